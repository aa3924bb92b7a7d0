"""Fails tests that are skipped in CI for a reason that is not listed here. A pytest plugin: `conftest.py` loads it.

A skip hides a test from whoever trusts CI. CI installs everything that pip can install, so only what pip can't install, or what
depends on the machine, may be a reason.
"""

import os
import sys
from collections.abc import Generator
from typing import TypeVar

import pytest

TOOLS = ("needs playwright", "needs Debian's chromium", "needs Debian's package prometheus", "needs the extra png")
"""Programs and packages that CONTRIBUTING.md names and that the development environment lacks."""
MACHINE = ("there is a CUDA device", "needs Linux 6.9")
LINUX_ONLY = (
    "Triton is not made for this platform",
    "the parent's death is signalled on Linux only",
    "no device that is always full",
    "reads /proc",
    "needs Linux's list of what a process has loaded",
    "threads have a priority of their own on Linux only",
)
EXPECTED = {*TOOLS, *MACHINE, *(LINUX_ONLY if sys.platform != "linux" else ())}

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Checks a test that was skipped."""
    return _checked((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Checks a file that was skipped as a whole."""
    return _checked((yield))


def _checked(report: Report) -> Report:
    """The report, as a failure if it is an unexpected skip and this is CI."""
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        assert isinstance(report.longrepr, tuple)
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in EXPECTED:
            report.outcome = "failed"
            report.longrepr = f"unexpected skip in CI: {reason!r} is not in tests/support/expected_skips.py"
    return report
