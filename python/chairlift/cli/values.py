"""What a flag's value may be: readers for argparse, whose complaints say what is allowed."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import TypeVar

from chairlift.errors import InvalidSetting
from chairlift.settings import parse_size
from chairlift.svg import Svg

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


def reader(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """A reader of what `parse` reads. The text of its ValueError is the complaint."""

    def read(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def whole(least: int, most: int) -> Callable[[str], int]:
    """A reader of whole numbers from `least` to `most`."""
    return _within(int, least, most, f"a whole number from {least:,} to {most:,}")


def number(least: float, most: float, *, infinite: bool = False) -> Callable[[str], float]:
    """A reader of numbers from `least` to `most`, and of inf where `infinite`."""
    expected = f"a number from {least:,g} to {most:,.12g}{', or inf' * infinite}"
    return _within(float, least, most, expected, also=math.inf if infinite else most)


def size(least: int, most: int) -> Callable[[str], int]:
    """A reader of sizes such as 32k or 2G from `least` to `most`."""
    return _within(reader(parse_size), least, most, f"a size from {least:,} to {most:,}")


def _within(
    parse: Callable[[str], Number], least: Number, most: Number, expected: str, also: Number | None = None
) -> Callable[[str], Number]:
    """A reader of numbers from `least` to `most`, and of `also`; its complaint says what is `expected`."""

    def read(text: str) -> Number:
        try:
            number = parse(text)
            if not (least <= number <= most or number == also):
                raise ValueError
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text:.50}") from None
        return number

    return read


def several(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """A reader of values with commas between them."""
    return lambda text: [read(part) for part in text.split(",")]


def output(text: str) -> str:
    """Reads the path of a file to be written; one that exists is written over.

    A file that cannot be written is an error now, before the work whose result it would get.
    """
    directory = os.path.dirname(text) or "."
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text:.200} is a directory: name a file")
    if not os.path.isdir(directory):
        raise argparse.ArgumentTypeError(f"{text:.200}: there is no directory {directory:.200}")
    if not text or not os.access(text if os.path.exists(text) else directory, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text:.200} cannot be written: name a file elsewhere")
    if text.endswith(".png"):
        try:
            Svg('<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>').png()
        except InvalidSetting as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def picture(text: str) -> str:
    """Reads the path of an SVG or PNG file to be written."""
    if not text.endswith((".svg", ".png")):
        raise argparse.ArgumentTypeError(f"{text:.200}: expected a name that ends in .svg or .png")
    return output(text)


def output_directory(text: str) -> str:
    """Reads the path of a directory to write in, which is made if need be."""
    there = os.path.abspath(text)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise argparse.ArgumentTypeError(f"{text:.200}: {there:.200} is a file")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text:.200} cannot be written in: name another directory")
    return text
