"""`chairlift policy`: begins a policy in Python."""

from __future__ import annotations

import argparse
import keyword
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from chairlift.cli import flags
from chairlift.errors import InvalidSetting

_EXAMPLES = """\
examples:
  chairlift policy new Mine                                        writes mine.py and test_mine.py
  python -m pytest test_mine.py                                    runs it on a small trace
  chairlift simulate --trace conv.csv --policy mine.py:Mine        what it would do to a trace
  chairlift compare --policy fcfs,mine.py:Mine                     beside another policy
  chairlift replay day.journal --policy mine.py:Mine               what it would have done to a recorded day
"""

_POLICY = '''\
"""A scheduling policy."""

from chairlift import Candidate, Policy


class {name}(Policy):
    """the least remaining work"""

    cache = "when_queued"

    def rank(self, request: Candidate) -> int:
        return request.work_left
'''

_TEST = '''\
"""What {name} does to a queue."""

from chairlift import simulate
from chairlift.bench.traces import TraceRequest

from {module} import {name}


def test_every_request_is_answered():
    # A long request, then short ones, all at once and for one slot.
    trace = [TraceRequest(0.0, 500, 100), *(TraceRequest(0.0, 10, 5) for _ in range(20))]
    sizes = {{"max_num_seqs": 1, "num_kv_blocks": 100, "max_model_len": 1024}}
    mine = simulate(trace, model="SmolLM2-135M", scheduling_policy={name}(), **sizes)
    fcfs = simulate(trace, model="SmolLM2-135M", **sizes)
    assert len(mine.finished) == len(trace)
    assert mine.e2e().mean() < fcfs.e2e().mean()
'''


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "policy", summary, _EXAMPLES, run)
    actions = parser.add_subparsers(dest="action", required=True, metavar="new")
    new = actions.add_parser("new", help="write a policy of ten lines, and its test")
    new.add_argument("name", metavar="NAME", help="the class's name, such as Mine")


def run(args: argparse.Namespace) -> int:
    """Writes both files here. Raises InvalidSetting for a name that is no class's, and for files that exist."""
    name = args.name
    module = name.lower()
    if not name.isidentifier() or keyword.iskeyword(name) or keyword.iskeyword(module) or name in ("Candidate", "Policy"):
        raise InvalidSetting(f"{name!r:.100} cannot be a class's name: try Mine")
    files = {Path(f"{module}.py"): _POLICY, Path(f"test_{module}.py"): _TEST}
    for path in files:
        if path.exists():
            raise InvalidSetting(f"{path} exists already")
    if module in sys.stdlib_module_names or PathFinder.find_spec(module) is not None:
        raise InvalidSetting(f"{module}.py would hide Python's module {module} from programs that run here: try another name")
    for path, text in files.items():
        try:
            path.write_text(text.format(name=name, module=module), encoding="utf-8")
        except OSError as error:
            with suppress(OSError):
                path.unlink()  # of a full disk it is empty
            raise InvalidSetting(f"{path}: cannot be written ({error.strerror})") from None
    print(f"{' and '.join(map(str, files))}: run the test with python -m pytest test_{module}.py")
    return 0
