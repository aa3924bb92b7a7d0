"""Writes docs/reference/*.md from the code: `python docs/generators/reference.py`. A test fails if a page is stale."""

from __future__ import annotations

from pathlib import Path

import cli_page
import errors_page
import http_page
import metrics_page
import python_page

FOLDER = Path(__file__).parent.parent / "reference"
HEAD = "<!-- made by docs/generators: run `make docs-reference` after a change -->\n"


def pages() -> dict[Path, str]:
    """Returns the text of each page."""
    makers = {"cli": cli_page, "http": http_page, "metrics": metrics_page, "python": python_page, "errors": errors_page}
    return {FOLDER / f"{name}.md": HEAD + maker.page() for name, maker in makers.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
