"""The bar of a command that takes a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(text: str) -> Iterator[Callable[[float], None]]:
    """Shows a bar in the terminal until it ends; what it gives hears which part is done, from 0 to 1."""
    from rich.console import Console  # here, for most commands show none
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=1.0)
        yield lambda done: progress.update(task, completed=done)
