"""Records docs/images/recording.svg: a server under a burst, `explain`, and a stream whose engine is killed.

`python docs/generators/recording.py` runs a real server with the default model for about a minute. Pauses of more than a second are
shortened.
"""

from __future__ import annotations

import contextlib
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path

from running_server import SHARED_FLAGS, Server

IMAGE = Path(__file__).parent.parent / "images/recording.svg"
COLUMNS, LINE, CHARACTER = 100, 18, 7.8
LONGEST_PAUSE, HOLD = 1.0, 6.0
"""Seconds: the longest pause that is shown, and how long the end stays."""
_STYLE = """\
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d6dae0; white-space: pre; opacity: 0 }
.command { fill: #7fd18b } .note { fill: #f0b46a }
@media (prefers-reduced-motion: reduce) { text { animation: none !important; opacity: 1 } }
"""


class Screen:
    """What was printed, with the time of each piece."""

    def __init__(self) -> None:
        self._pieces: list[tuple[float, int, int, str, str]] = []
        self._row, self._column = 0, 0

    def write(self, text: str, kind: str = "") -> None:
        """Prints text after what is there; a line that is full is broken."""
        for part in text.splitlines(keepends=True):
            if self._column and self._column + len(part.rstrip("\n")) > COLUMNS:
                self._row, self._column = self._row + 1, 0
            self._pieces.append((time.monotonic(), self._row, self._column, part.rstrip("\n"), kind))
            self._row, self._column = (self._row + 1, 0) if part.endswith("\n") else (self._row, self._column + len(part))

    def svg(self) -> str:
        """Returns the recording as an SVG that repeats."""
        shown, clock, before = list[float](), 0.5, self._pieces[0][0]
        for at, *_ in self._pieces:
            clock += min(at - before, LONGEST_PAUSE)
            shown.append(clock)
            before = at
        whole, width, height = clock + HOLD, int(COLUMNS * CHARACTER) + 32, (self._row + 1) * LINE + 20
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">']
        parts += ["<style>", _STYLE]
        for number, at in enumerate(shown):
            start = 100 * at / whole
            parts.append(f"@keyframes k{number} {{ 0%, {start:.2f}% {{ opacity: 0 }} {start + 0.01:.2f}%, 100% {{ opacity: 1 }} }}")
        parts += ["</style>", f'<rect width="{width}" height="{height}" rx="6" fill="#16191d"/>']
        for number, (_, row, column, text, kind) in enumerate(self._pieces):
            spaces = len(text) - len(text.lstrip())  # renderers disagree about spaces at the beginning
            x, y = 16 + (column + spaces) * CHARACTER, (row + 1) * LINE + 6
            style = f"animation: k{number} {whole:.1f}s infinite"
            parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y}" style="{style}">{escape(text.strip())}</text>')
        return "\n".join([*parts, "</svg>\n"])


def record(server: Server, screen: Screen) -> None:
    """Runs the three scenes."""
    screen.write(f"$ chairlift serve {' '.join(SHARED_FLAGS)}\n", "command")
    server.wait()
    for line in server.log().splitlines():
        if "ready in" in line or "listening on" in line:
            screen.write(f"{line.partition(': process')[0]}\n")
    screen.write("\n# bob sends 12 requests at once; a second later alice sends one\n", "note")
    with ThreadPoolExecutor(12) as pool:
        for number in range(1, 13):
            pool.submit(lambda name: "".join(server.answer("KEY2", name)), f"bob-{number}")
        time.sleep(1)
        alone = "".join(server.answer("KEY1", "alice-1"))
    for key, name in (("KEY1", "alice-1"), ("KEY2", "bob-12")):
        screen.write(f"$ chairlift explain {name}\n", "command")
        screen.write("".join(f"{line}\n" for line in textwrap.wrap(server.explain(key, name), COLUMNS)))
    screen.write("\n# alice sends the same request again; the engine is killed while it streams\n", "note")
    whole = ""
    for at, piece in enumerate(server.answer("KEY1", "alice-2")):
        screen.write(piece.replace("\n", " "))
        whole += piece
        if at == 20:
            screen.write("\n$ kill -9 ENGINE\n", "command")
            server.kill_engine()
    screen.write("\n")
    equal = "byte for byte the first answer" if whole == alone else "not the first answer"
    screen.write(f"# {len(whole)} characters: {equal}, which had 12 requests beside it\n", "note")


def main() -> None:
    """Records the image."""
    screen = Screen()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Server(folder, *SHARED_FLAGS)) as server:
        record(server, screen)
    IMAGE.write_text(screen.svg())


if __name__ == "__main__":
    main()
