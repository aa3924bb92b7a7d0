"""The wheel: one file for every Python from 3.11 on, with the kernels in it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "maturin", "build", "--release", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "PYO3_PYTHON": sys.executable})
    (built,) = out.glob("*.whl")
    return built


def test_name_says_abi3_from_python_3_11(wheel: Path) -> None:
    assert wheel.name.startswith("chairlift-")
    assert "-cp311-abi3-" in wheel.name


def test_holds_the_core_the_kernels_and_the_types_and_is_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "chairlift/_core.abi3.so" in names
    assert {"chairlift/_core.pyi", "chairlift/py.typed"} <= names
    kernels = {f"chairlift/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert "chairlift/kernels/rms_norm.py" in kernels
    assert kernels <= names
    modules = {f"chairlift/{path.relative_to(ROOT / 'python/chairlift')}" for path in (ROOT / "python/chairlift").rglob("*.py")}
    assert modules <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]
    assert wheel.stat().st_size < 10e6
