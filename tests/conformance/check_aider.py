"""aider, as its user types it: an edit of a file."""

import subprocess
import sys

QUIET = (
    "--no-analytics",
    "--no-check-update",
    "--no-show-release-notes",
    "--no-show-model-warnings",
    "--yes-always",
    "--no-pretty",
    "--no-git",
)


def test_an_edit(scripted, key, alone, project):
    (project / "a.py").write_text("print(1)\n")
    environ = alone | {"OPENAI_API_BASE": f"{scripted}/v1", "OPENAI_API_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [sys.executable, "-m", "aider", *QUIET, "--model", "openai/org/fake-model", "--edit-format", "whole"]
    message = "SAY:a.py\n```\nprint(2)\n```\n|"
    done = subprocess.run(
        [*command, "--message", message, "a.py"],
        capture_output=True,
        text=True,
        cwd=project,
        env=environ,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert (project / "a.py").read_text() == "print(2)\n"
