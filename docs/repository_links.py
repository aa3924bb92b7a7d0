"""MkDocs hook: checks links from the documentation to other files of the repository, such as the generators of pages.

The site does not contain these files, so their links become plain text, or links to `repo_url` if mkdocs.yml sets it.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.repository_links")

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Returns the page with its links to files outside of the documentation replaced; warns if a file does not exist."""
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_path).parent

    def replace(link: re.Match[str]) -> str:
        text, path, fragment = link[1], link[2], link[3] or ""
        target = (folder / path).resolve()
        published = target.is_relative_to(docs) and target.suffix != ".py" and not target.is_dir()
        if "://" in path or published:
            return link[0]
        if not target.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_path, path)
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target.relative_to(docs.parent)}{fragment})"

    return _LINK.sub(replace, markdown)
