"""The wheel: one file for every Python from 3.11 on, with the kernels in it."""

import base64
import csv
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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
    assert {"chairlift/_core.pyi", "chairlift/py.typed", "chairlift/server/routes/ops/static/dashboard.html"} <= names
    kernels = {f"chairlift/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "kernels").rglob("*.py")}
    assert "chairlift/kernels/rms_norm.py" in kernels
    assert kernels <= names
    modules = {f"chairlift/{path.relative_to(ROOT / 'python/chairlift')}" for path in (ROOT / "python/chairlift").rglob("*.py")}
    assert modules <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]
    assert wheel.stat().st_size < 10e6


def test_the_one_for_cpus_has_the_same_files_and_fewer_dependencies(wheel: Path, tmp_path: Path) -> None:
    copy = shutil.copy(wheel, tmp_path)
    command = [sys.executable, str(ROOT / "packaging" / "cpu_wheel.py"), str(copy)]
    cpu = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    assert cpu.name == wheel.name.replace("chairlift-", "chairlift_cpu-")
    with zipfile.ZipFile(cpu) as archive, zipfile.ZipFile(wheel) as whole:
        files = {name: archive.read(name) for name in archive.namelist()}
        package = {name: whole.read(name) for name in whole.namelist() if ".dist-info/" not in name}
    info = next(name for name in files if name.endswith("/METADATA")).removesuffix("METADATA")
    assert {name: data for name, data in files.items() if ".dist-info/" not in name} == package
    assert b"chairlift=chairlift.__main__:main" in files[f"{info}entry_points.txt"]
    recorded = {name: digest for name, digest, _ in csv.reader(files.pop(f"{info}RECORD").decode().splitlines())}
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() for name, data in files.items()}
    assert recorded == {name: f"sha256={digest}" for name, digest in digests.items()} | {f"{info}RECORD": ""}

    metadata = HeaderParser().parsestr(files[f"{info}METADATA"].decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [requirement.partition(">")[0] for requirement in project["dependencies"]]
    assert {"accelerate", "torch", "transformers", "triton"} <= set(names)
    required = [value.partition(">")[0] for value in metadata.get_all("Requires-Dist") if "extra ==" not in value]
    assert sorted(required) == sorted(set(names) - {"accelerate", "torch", "transformers", "triton"})
    assert (metadata["Name"], metadata.get_all("Provides-Extra")) == ("chairlift-cpu", ["fleet", "gate", "gguf", "otel", "png"])
    extras = [value.partition(">")[0] for value in metadata.get_all("Requires-Dist") if "extra ==" in value]
    kept = [one.partition(">")[0] for extra in ("fleet", "gate", "gguf", "otel", "png") for one in project["optional-dependencies"][extra]]
    assert sorted(extras) == sorted(kept)
    assert "Chairlift" in metadata.get_payload()


def test_imports_under_every_python_at_hand_without_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    found = [shutil.which(f"python3.{minor}") for minor in range(12, 15)]
    program = (
        "import chairlift, chairlift._core as core\n"
        "core.Scheduler(num_kv_blocks=9, block_size=4, max_num_batched_tokens=8, max_num_seqs=2, max_model_len=16).check()\n"
        "assert chairlift.SamplingParams(temperature=0.0).greedy\n"
    )
    for python in [sys.executable, *filter(None, found)]:
        # A version manager's stub for a Python that is not installed can't even say its version.
        if subprocess.run([python, "--version"], capture_output=True).returncode:
            continue
        # -S: no site-packages, so neither torch nor numpy.
        subprocess.run([python, "-S", "-c", program], cwd=tmp_path, check=True)
