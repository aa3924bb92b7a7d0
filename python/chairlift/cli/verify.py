"""`chairlift verify`: compares a model with transformers or llama.cpp."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from chairlift.cli import flags
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError

_EXAMPLES = """\
examples:
  chairlift verify ./model                                     a directory, with this Python's transformers
  chairlift verify ./model.gguf                                a GGUF file, with the llama-server on the path
  chairlift verify ./model.gguf --llama-cpp ~/llama.cpp/build  with another llama-server; LLAMA_CPP names one too
  chairlift verify ./model --python ~/env/bin/python           with the transformers of another environment

The report can be pasted into an issue. It says where the first token, log-probability or number differs, and how close the choice was.
Both compute in float32. If a GGUF file has other types, llama.cpp gets a copy in float32, in the directory for temporary files.

The exit status is 0 if both agree, 1 if they differ, 2 if they cannot be compared.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "verify", summary, _EXAMPLES, run)
    flags.add_model(parser)
    flags.add_fields(parser, EngineConfig, ("revision", "cache_dir"))
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--python", type=Path, metavar="PATH", help="a Python with torch and transformers (default: this one)")
    chosen.add_argument("--llama-cpp", type=Path, metavar="PATH", help="llama-server, or llama.cpp's folder (default: that on the path)")


def run(args: argparse.Namespace) -> int:
    """Prints the report and returns the exit status."""
    from chairlift.verification.verify import verify

    # So that the reference's process and its files do not outlive this one.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        findings = verify(args.engine, python=args.python, llama_cpp=args.llama_cpp)
    except (ChairliftError, OSError, MemoryError) as error:
        print(f"cannot compare: {error}")
        return 2
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(findings.text())
    return 1 if findings.differences else 0
