"""aider: an edit of a file, as its user types it; and a conversation, by its Python interface."""

import subprocess
import sys

import pytest

QUIET = (
    "--no-analytics",
    "--no-check-update",
    "--no-show-release-notes",
    "--no-show-model-warnings",
    "--yes-always",
    "--no-pretty",
    "--no-git",
)
MODEL = "openai/org/fake-model"
CONVERSATION = """
import sys
from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model

coder = Coder.create(Model({model!r}), "diff", InputOutput(yes=True, pretty=False), fnames=["a.py"], use_git=False, auto_lint=False)
for line in sys.stdin:
    coder.run(line.replace(chr(92) + "n", chr(10)))
"""


@pytest.fixture
def run(scripted, key, alone, project):
    """Runs aider's Python in the project with these arguments and this input."""
    environ = alone | {"OPENAI_API_BASE": f"{scripted}/v1", "OPENAI_API_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def run(*arguments, text=""):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=project, env=environ, timeout=300)
        assert done.returncode == 0, done.stderr

    return run


def test_an_edit(run, project):
    (project / "a.py").write_text("print(1)\n")
    run("-m", "aider", *QUIET, "--model", MODEL, "--edit-format", "whole", "--message", "SAY:a.py\n```\nprint(2)\n```\n|", "a.py")
    assert (project / "a.py").read_text() == "print(2)\n"


def test_a_conversation_stays_in_the_cache(run, project, cache_use):
    (project / "a.py").write_text("print(1)\n")
    talk = [rf"What about the weather? SAY:Rather fine, whether here or there ({number}).|" for number in range(6)]
    edit = r"SAY:a.py\n```\n<<<<<<< SEARCH\nprint(1)\n=======\nprint(2)\n>>>>>>> REPLACE\n```\n|"
    run("-c", CONVERSATION.format(model=MODEL), text="\n".join([*talk[:3], edit, *talk[3:]]))
    assert (project / "a.py").read_text() == "print(2)\n"
    found, _ = cache_use()  # it moves the files and a reminder of 3 kB to the end of each prompt
    assert found >= 0.95
