"""Writes the repository's URL into what is published, before a release is built: `python .ci/set_repository_url.py URL`.

pyproject.toml gets `[project.urls]`. Relative links and images in README.md become absolute, because a package index shows that file
without the repository.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def project_urls(url: str) -> str:
    """The table `[project.urls]`."""
    return (
        "[project.urls]\n"
        f'Documentation = "{url}/blob/main/docs/index.md"\n'
        f'Repository = "{url}"\n'
        f'Issues = "{url}/issues"\n'
        f'Changelog = "{url}/blob/main/CHANGELOG.md"\n'
    )


def absolute(markdown: str, url: str) -> str:
    """The text with absolute links: images point to the raw file."""

    def replace(link: re.Match[str]) -> str:
        image, text, path = link.groups()
        return f"{image}[{text}]({url}/{'raw' if image else 'blob'}/main/{path})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^()\s]+)\)", replace, markdown)


def main(url: str, root: Path = ROOT) -> None:
    """Changes both files below `root`."""
    project, readme = root / "pyproject.toml", root / "README.md"
    text = project.read_text()
    if "[project.urls]" in text:
        sys.exit("pyproject.toml has [project.urls] already")
    project.write_text(text.replace("[project.scripts]", f"{project_urls(url)}\n[project.scripts]", 1))
    readme.write_text(absolute(readme.read_text(), url))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith("https://"):
        sys.exit(__doc__)
    main(sys.argv[1].rstrip("/"))
