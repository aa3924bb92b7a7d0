"""The whole order of `benches/gpu` on a CPU: every script, all its parts, and what it leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not made for this platform")

SCRIPT = Path(__file__).parents[2] / "benches" / "gpu" / "run.py"
QUICK = "import quick_interpreter, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
PARTS = {
    "smoke": {"bf16", "8B-bf16", "sampling", "grammar", "fp8", "swap", "restart", "eager", "8B-fp8", "hybrid", "mxfp4"},
    "correct": {"layers-float32", "sampling", "engine", "combine", "experts"},
    "serve": {"135M", "135M-eager", "tiny-bf16", "ceilings"},
    "kernels": {"ceilings", "decode", "prefill", "layers", "sampling", "products", "experts", "eight-bits", "decode-fp8", "many-layers"},
}
"""Parts that must be done, by script."""


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes of interpreted kernels, beside other tests on few cores
def test_the_whole_order_runs_dry(tmp_path):
    # Other threads would only wait for work this small.
    path = os.pathsep.join((str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", QUICK, str(SCRIPT), "--dry", "--sweep", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}{kind}" for name in PARTS for kind in (".jsonl", ".md")}
    for name, parts in PARTS.items():
        records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        ends = {record["part"]: record["end"] for record in records if "end" in record}
        assert set(ends.values()) == {"done"}
        assert parts <= ends.keys()
        assert "nothing here is a measurement" in (tmp_path / f"{name}.md").read_text()
        checks = [record["row"]["good"] for record in records if "good" in record.get("row", {})]
        assert (len(checks) > 10) == (name in ("smoke", "correct"))
