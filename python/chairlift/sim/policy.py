"""Scheduling policies in Python, for simulations."""

from __future__ import annotations

import importlib.util
import logging
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from chairlift import _core
from chairlift.errors import InvalidSetting

if TYPE_CHECKING:
    from chairlift._core import Candidate

log = logging.getLogger("chairlift")

HELP = dict(_core.POLICIES)
"""What goes first under each policy that simulations know, by its name."""


class Policy:
    """The order in which waiting requests are served, and what may preempt what. Subclass it, and give an instance to `simulate`.

    The attributes say what the policy decides; the methods are asked only for that. They get numbers (`Candidate`) and return numbers, and
    equal arguments must have equal answers. The scheduler keeps its promises around every policy: tiers and classes, ageing, progress.
    These are the rules of the policies in Rust (rust/core/src/policy), so what pays in a simulation can become one file there.
    """

    name: ClassVar[str] = ""
    """The name in results; the class's name by default."""
    help: ClassVar[str] = ""
    """Which request goes first, in a few words."""
    grouping: ClassVar[str] = "single"
    """What goes before the rank: `single`, nothing; `classes`, the requests' `priority`; `tenants`, who take turns by their service."""
    prompt_token: ClassVar[int] = 1
    """The service of a token of a prompt that was not cached, where tenants take turns."""
    output_token: ClassVar[int] = 2
    """The service of an output token, where tenants take turns."""
    ranked: ClassVar[bool] = True
    """Whether `rank` orders the requests of a group; otherwise they go in the order of arrival."""
    orders_prompts: ClassVar[bool] = False
    """Whether the order also holds between waiting requests and prompts in progress."""
    cache: ClassVar[str] = "unused"
    """How the rank depends on `cached_tokens`: `unused`; `when_queued`, looked up once; `followed`, ranked again when more is cached."""
    preemption: ClassVar[str] = "never"
    """Whether `may_preempt` is asked: `never`; `free`, at every step; `within_budget`, while preemptions cost at most a fiftieth."""

    def __init_subclass__(cls) -> None:
        """Names the class and takes the first line of its docstring as help, unless it says both."""
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        if "help" not in cls.__dict__:
            cls.help = (cls.__doc__ or "").strip().partition("\n")[0]

    def rank(self, request: Candidate) -> int:
        """The position of a request in its group, at least 0. Lower ranks go first, and earlier arrivals within a rank."""
        return 0

    def drop_at(self, request: Candidate) -> int | None:
        """When to drop a request that has a deadline before it misses it, in microseconds of the simulated time."""
        return None

    def may_preempt(self, waiting: Candidate, running: Candidate) -> bool:
        """Whether a waiting request may take the slot and the blocks of a running one."""
        return False

    def victim_rank(self, running: Candidate) -> int:
        """The order of preemption within a tier: the highest is preempted first."""
        return 0


def use(policy: Policy) -> str:
    """Lets simulations of this process use a policy, and returns its name. Raises InvalidSetting for attributes that are wrong."""
    try:
        _core.add_policy(policy)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidSetting(f"the policy {type(policy).__name__} cannot be used: {error}") from None
    HELP[policy.name] = policy.help or policy.name
    return policy.name


def load(text: str) -> str:
    """Uses the policy `FILE.py:NAME` and returns its name. Raises InvalidSetting."""
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise InvalidSetting(f"there is no file {file}")
    # The name is no other module's: a file may be called random.py.
    spec = importlib.util.spec_from_file_location(f"policy in {path.resolve()}", path)
    if spec is None or spec.loader is None:
        raise InvalidSetting(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Some decorators, such as that of dataclasses, look for the module of a class here.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise InvalidSetting(f"{file} cannot be imported: {_last_line(error, path)}") from None
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        known = sorted(
            key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Policy) and value is not Policy
        )
        raise InvalidSetting(f"{file} has no policy {name!r}: it has {', '.join(known) or 'none'}")
    try:
        policy = found()
    except (Exception, SystemExit) as error:
        raise InvalidSetting(f"the policy {name} cannot be made: {_last_line(error, path)}") from None
    return use(policy)


def report_failure(name: str | None) -> str | None:
    """Logs what a policy of this name raised in the last simulation, with its line, and returns it; None if it worked.

    Raises what is no error, such as KeyboardInterrupt.
    """
    if (failure := failure_of(name)) is not None:
        log.warning("the policy %s failed, and the queue went on in the order of arrival: %s", name, failure)
    return failure


def failure_of(name: str | None, *, for_good: bool = False) -> str | None:
    """What a policy of this name raised since the last call, with its line; None if it works. Raises what is no error.

    The policy then decides again, unless it is replaced `for_good`.
    """
    if name is None or name not in _core.added_policies() or (failure := _core.take_policy_failure(name, for_good)) is None:
        return None
    if not isinstance(failure, Exception | SystemExit):
        raise failure
    return _last_line(failure)


def _last_line(error: BaseException, file: Path | None = None) -> str:
    """An error, and where it left `file`, which is that of the first call by default: what this calls may be in other files."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(file) if file else frames[0].filename if frames else ""
    lines = [frame.lineno for frame in frames if frame.filename == own]
    place = f" (line {lines[-1]} of {Path(own).name})" if lines else ""
    return f"{type(error).__name__}: {error}{place}"
