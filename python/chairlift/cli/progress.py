"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[[float], None]]:
    """Shows a progress bar in the terminal. Yields the function that sets the completed share, from 0 to 1."""
    from rich.console import Console  # most commands show no bar
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=1.0)
        yield lambda done: progress.update(task, completed=done)
