"""Tables and code in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table."""
    heading = list(head)
    lines = [heading, ["---"] * len(heading), *([cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: str) -> str:
    """Returns the text as code, or nothing for an empty text."""
    return f"`{text}`" if text else ""


def paragraph(text: str) -> str:
    """Returns the text in one line."""
    return " ".join(text.split())
