"""Writes the lock files of the image: every package that is installed there, with its version and the hashes of its files.

Usage: python packaging/lock.py, with the Python of the image (3.13) on x86-64 Linux; `make lock` does it. It needs pip-tools.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from cpu_wheel import LEFT_OUT, package_name

ROOT = Path(__file__).parent.parent


def requirements() -> dict[str, list[str]]:
    """What each lock file is made of, by its name."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        document = tomllib.load(file)
    project = document["project"]
    needed, extras = project["dependencies"], project["optional-dependencies"]
    return {
        "build": document["build-system"]["requires"],
        "cpu": [one for one in needed if package_name(one) not in LEFT_OUT] + extras["gguf"],
        "cuda": needed + extras["gguf"] + extras["quantized"],
    }


def lock(name: str, needed: list[str]) -> None:
    """Writes the lock file `name`, anew with the newest versions."""
    with tempfile.TemporaryDirectory() as directory:
        source, out = Path(directory) / f"{name}.in", Path(directory) / f"{name}.lock"
        source.write_text("".join(f"{one}\n" for one in needed))
        command = [sys.executable, "-m", "piptools", "compile", "--quiet", "--generate-hashes", "--allow-unsafe", "--strip-extras"]
        command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--output-file", str(out), str(source)]
        # Packages that lie on this machine are not those of the index.
        subprocess.run(command, check=True, env={key: value for key, value in os.environ.items() if key != "PIP_FIND_LINKS"})
        head = "# Written by make lock: what the image installs.\n"
        (ROOT / "packaging" / out.name).write_text(head + out.read_text())


if __name__ == "__main__":
    for name, needed in requirements().items():
        lock(name, needed)
