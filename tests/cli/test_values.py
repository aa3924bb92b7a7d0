"""Every value of a flag is accepted, or refused with one line that says what is allowed."""

import argparse
import math
import os

import pytest

from chairlift.cli import main, values
from chairlift.config import EngineConfig

HOSTILE = ["nan", "inf", "-inf", "1e999", "-1", "0", "1e-300", "1e300", "x", "", " ", "1,,2", "9" * 5000, "0x10", "٣", "1_0", "2.5", "\0"]
UNLIMITED = {"--request-rate", "--burstiness", "--request-timeout", "--ready-check-timeout-sec"}
"""Flags that may be infinite."""

SETTINGS = set(EngineConfig.__dataclass_fields__)
"""Settings that are checked together, after parsing."""


def actions():
    def below(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name in action.choices:
                    yield from below(action.choices[name])
            else:
                yield parser.prog, action

    commands = ("chairlift bench ", "chairlift simulate", "chairlift calibrate", "chairlift plan", "chairlift compare")
    return [(prog, action) for prog, action in below(main.build_parser()) if prog.startswith(commands) and action.type is not None]


def test_every_flag_says_what_is_allowed():
    found = actions()
    assert len(found) > 100
    for prog, action in found:
        flag = f"{prog} {action.option_strings[-1]}"
        assert action.type not in (int, float), f"{flag} takes anything that is a number"
        for text in HOSTILE:
            try:
                value = action.type(text)
            except argparse.ArgumentTypeError:
                continue
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, (int, float)) and action.dest not in SETTINGS:
                    assert math.isfinite(number) or (number == math.inf and action.option_strings[0] in UNLIMITED), flag


def test_numbers():
    assert [values.whole(0, 20)(text) for text in ("0", "20")] == [0, 20]
    assert [values.number(0.01, 5, infinite=True)(text) for text in ("0.01", "5", "inf")] == [0.01, 5, math.inf]
    assert values.several(values.whole(1, 9))("1,2") == [1, 2]


def test_outputs(tmp_path, monkeypatch):
    (tmp_path / "there").write_text("")
    for name in ("there", "new"):
        assert values.output(str(tmp_path / name)) == str(tmp_path / name)
    assert values.output_directory(str(tmp_path / "a" / "b")) == str(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    monkeypatch.chdir(tmp_path)
    assert values.output("new") == "new"
    # As root anything can be written.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for read in (values.output, values.output_directory):
        with pytest.raises(argparse.ArgumentTypeError, match="name a"):
            read("new")
