"""In CI, a test that is skipped for a reason that nobody listed fails."""

import os
import subprocess
import sys
from pathlib import Path

import expected_skips
import pytest

TESTS = f"""
import pytest

def test_runs():
    pass

@pytest.mark.skip(reason={expected_skips.TOOLS[0]!r})
def test_expected():
    pass

@pytest.mark.skipif(True, reason="nobody knows why")
def test_unexpected():
    pass

def test_inside():
    pytest.importorskip("no_such_module")

@pytest.mark.xfail(reason="known")
def test_known_to_fail():
    assert False
"""


def outcome(directory: Path, ci: str) -> str:
    """The last line of a run of pytest over the files in `directory`."""
    environment = {**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(expected_skips.__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-p", "expected_skips", "-p", "no:cacheprovider", "-q", "--rootdir", directory, directory]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True)
    return done.stdout.splitlines()[-1].partition(" in ")[0]


def test_an_unexpected_skip_is_a_failure_in_ci_only(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    assert outcome(tmp_path, "true") == "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error"
    assert outcome(tmp_path, "") == "1 passed, 3 skipped, 1 xfailed"


@pytest.mark.parametrize(("ci", "reported"), [("true", "1 error"), ("", "1 skipped")])
def test_so_is_a_file_that_is_skipped_as_a_whole(tmp_path, ci, reported):
    (tmp_path / "test_some.py").write_text('import pytest\npytest.importorskip("no_such_module")\n')
    assert outcome(tmp_path, ci) == reported
