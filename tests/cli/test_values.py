"""Every value of a flag is accepted, or refused with one line that says what is allowed."""

import argparse
import contextlib
import io
import math
import os

import pytest

from chairlift.cli import flags, main, values
from chairlift.config import EngineConfig
from chairlift.server.config import ServerConfig

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


def numeric_flags():
    """The command and each flag of it that takes a number, with what else the command needs."""

    def below(parser, words):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, child in action.choices.items():
                    yield from below(child, (*words, name))
            elif action.option_strings and action.type is not None and any(is_number(action.type, text) for text in ("1", "0.5", "1G")):
                yield words, action.option_strings[0], [*needed(parser, action)]

    def needed(parser, flag):
        for action in parser._actions:
            if action.required and action is not flag:
                value = next(iter(action.choices)) if action.choices else "127.0.0.1:1"
                yield from (*action.option_strings[:1], value)

    return list(below(main.build_parser(), ()))


def is_number(read, text):
    try:
        return isinstance(read(text), (int, float))
    except (argparse.ArgumentTypeError, ValueError):
        return False


def complaint(parser, words, flag, text):
    """What a command says of the flag's value; None if it takes the value."""
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            args = vars(parser.parse_args([*words, f"{flag}={text}"]))
        flags.read(EngineConfig, args)
        flags.read(ServerConfig, args)
    except SystemExit:
        return said.getvalue()
    except ValueError as error:
        return str(error)
    return None


def test_no_number_ends_in_a_traceback():
    parser, found = main.build_parser(), numeric_flags()
    assert len(found) > 250
    for words, flag, needed in found:
        said = {text: complaint(parser, [*words, *needed], flag, text) for text in ("0", "-1", "9" * 30, "nan", "x")}
        assert all(flag in one or "is required" in one for one in said.values() if one is not None), f"{words}: {said}"
        accepted = {text for text, one in said.items() if one is None}
        limited = {"nan", "x"} if flag in UNLIMITED | {"--keep-alive"} else {"nan", "x", "9" * 30}
        assert not limited & accepted, f"{words} {flag} takes {accepted}"
        assert not accepted or flag not in ("--tensor-parallel-size", "--replicas", "--threads")


def test_numbers():
    assert [values.whole(0, 20)(text) for text in ("0", "20")] == [0, 20]
    assert [values.number(0.01, 5, infinite=True)(text) for text in ("0.01", "5", "inf")] == [0.01, 5, math.inf]
    assert values.several(values.whole(1, 9))("1,2") == [1, 2]


def test_sizes():
    assert [values.size(1, 2**40)(text) for text in ("7", "400k", "1.5G")] == [7, 400 << 10, 3 << 29]
    for text in ("0", "2T", "2.5", "x"):
        with pytest.raises(argparse.ArgumentTypeError):
            values.size(1, 2**40)(text)


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
