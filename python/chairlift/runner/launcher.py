"""What Triton needs to compile its launcher: the C module that starts kernels. Imports neither torch nor Triton."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


def missing_for_launcher() -> str | None:
    """What is missing, with the packages that have it; None if nothing is.

    Looks where `triton/runtime/build.py` looks. Triton also keeps launchers that it compiled, and needs neither for them.
    """
    missing = []
    compiler = os.environ.get("CC")
    if not (shutil.which(compiler) if compiler else shutil.which("gcc") or shutil.which("clang")):
        named = f"the C compiler {compiler} that CC names" if compiler else "a C compiler"
        missing.append(f"{named} (apt install gcc libc6-dev, or dnf install gcc)")
    scheme = sysconfig.get_default_scheme()
    include = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    if not Path(include, "Python.h").exists():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        missing.append(f"Python.h (apt install {python}-dev, or dnf install {python}-devel)")
    return " and ".join(missing) or None


def explain_launcher_error(error: Exception) -> str | None:
    """What to do about an error of Triton as it compiles its launcher; None if the error is another."""
    if not isinstance(error, subprocess.CalledProcessError) and "C compiler" not in str(error):
        return None
    missing = missing_for_launcher()
    why = f"needs {missing}" if missing else f"that failed ({str(error).splitlines()[0]:.200})"
    return f"Triton compiles a launcher for its kernels, and {why}"
