"""`chairlift serve`: what it does before it listens."""

import subprocess
import sys

START = """
import os, subprocess, sys

def start(*_, **__):
    late = "chairlift.engine.client", "chairlift.tokenizer", "chairlift.server.supervisor", "starlette", "uvicorn"
    print([name for name in late if name in sys.modules], flush=True)
    os._exit(0)

subprocess.Popen.__init__ = start
from chairlift.cli.main import main
main(["serve", "--port", "0", "--device", "cpu"])
"""


def test_the_engines_process_starts_before_the_server_imports_its_own_modules():
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "[]\n", done.stderr
