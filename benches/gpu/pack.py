"""Gathers what these scripts need on a machine without a network, and prints how to begin there.

The machine is expected to have Python, torch with CUDA, Triton, transformers and their dependencies. To take along, besides what git
tracks: the Rust extension, built here, and the wheels that such a machine lacks, in `.whl`. Python and the C library there must not be
older than what the wheels are for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".whl"
EXTENSION = ROOT / "python" / "chairlift" / "_core.abi3.so"
EXTENSION_MODULE = {"PYO3_BUILD_EXTENSION_MODULE": "1"}
"""With this in its environment cargo builds the extension for any Python; else it is linked to the library of the one that it finds."""
MOST = 64
"""MiB that may travel: the checkout, the extension and the wheels."""
PACKAGES = (
    "annotated-types==0.8.0",
    "fa3-fwd==0.0.3",
    "prometheus-client==0.26.0",
    "pydantic-core==2.50.5",
    "pydantic==2.14.4",
    "python-multipart==0.0.34",
    "starlette==1.10.0",
    "typing-extensions==4.16.0",
    "typing-inspection==0.4.5",
    "uvicorn==0.54.0",
)
"""What an image for training lacks of Chairlift's dependencies, and FlashAttention-3, a peer of `kernels.py`."""
PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PREFIX = """\
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONPATH=$PWD/python:/tmp/site TRITON_CACHE_DIR=/tmp/triton-cache PYTHONUNBUFFERED=1"""


def main() -> None:
    """Builds, downloads, counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="the version of Python there (default: 3.12)")
    given = parser.parse_args()
    _build()
    _download(given.python)
    parts = {"checkout": _tracked(), "extension": EXTENSION.stat().st_size, "wheels": _size(WHEELS.glob("*.whl"))}
    print(", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in parts.items()))
    if sum(parts.values()) > MOST * 2**20:
        sys.exit(f"together {sum(parts.values()) / 2**20:.1f} MiB, more than {MOST}: leave out a wheel of PACKAGES")
    print(f"take along: the checkout, {EXTENSION.relative_to(ROOT)} and {WHEELS.relative_to(ROOT)}; begin there with\n\n{PREFIX}\n")


def _build() -> None:
    subprocess.run(["cargo", "build", "--release", "-p", "chairlift-python"], cwd=ROOT, env=os.environ | EXTENSION_MODULE, check=True)
    shutil.copy(ROOT / "target" / "release" / "lib_core.so", EXTENSION)


def _download(python: str) -> None:
    """Downloads the wheels anew."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(WHEELS)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *PACKAGES], check=True)


def _tracked() -> int:
    """Bytes of the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return _size(ROOT / name for name in listed.split("\0") if name)


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    main()
