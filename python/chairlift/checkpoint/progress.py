"""What a user sees on stderr while a model is found, downloaded and converted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

Progress: TypeAlias = bool | Callable[[str, int, int], None]
"""True: everything is shown on stderr; False: nothing. A function is called with a download's name, its bytes done and all its bytes."""


def say(text: str, progress: Progress = True) -> None:
    """Prints one line if `progress` is True."""
    if progress is not True:
        return
    from rich.console import Console  # slow to import, and seldom needed

    Console(stderr=True).print(text, highlight=False, soft_wrap=True, markup=False)


@contextlib.contextmanager
def announced(text: str, progress: Progress) -> Iterator[None]:
    """Shows `text` while the block runs: as a spinner on a terminal, as one line elsewhere."""
    if progress is not True:
        yield
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        say(text)
    with console.status(text):
        yield


@contextlib.contextmanager
def download_bar(what: str, num_bytes: int, progress: Progress) -> Iterator[Callable[[int], None]]:
    """Shows the download of `what` as a bar on a terminal, as one line elsewhere. Yields a function that sets the bytes done."""
    if progress is not True:
        yield partial(_report, progress, what, num_bytes)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        say(f"Fetching {what} ({num_bytes / 1e6:,.0f} MB)")
        yield lambda done: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"Fetching {what}", total=num_bytes)
        yield lambda done: bar.update(task, completed=done)


def _report(progress: Progress, what: str, num_bytes: int, done: int) -> None:
    if callable(progress):
        progress(what, done, num_bytes)
