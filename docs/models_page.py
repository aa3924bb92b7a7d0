"""Writes docs/models.md, whose table of architectures is made of `chairlift.architectures`: `python docs/models_page.py`."""

from __future__ import annotations

from pathlib import Path

from chairlift.architectures import ARCHITECTURES, OTHERS, Architecture, Code

PAGE = Path(__file__).with_name("models.md")
START, END = "<!-- made by docs/models_page.py -->\n", "<!-- end -->\n"


def page() -> str:
    """Returns the page with the current table."""
    before, _, rest = PAGE.read_text().partition(START)
    after = rest.partition(END)[2]
    head = "| models | in `config.json` | in GGUF files | differences from Llama | on a GPU |\n|---|---|---|---|---|\n"
    rows = "".join(map(_row, (*ARCHITECTURES.values(), *OTHERS)))
    return f"{before}{START}\n{head}{rows}\n{END}{after}"


def _row(known: Architecture) -> str:
    files = ", ".join(f"`{name}`" for name in known.gguf.names) if known.gguf else "not read"
    classes = ", ".join(f"`{name}`" for name in dict.fromkeys((known.name, *known.aliases, *known.wrappers)))
    device = "Chairlift's" if known.code is Code.RUST_AND_TORCH else "transformers' code"
    device += ", also on a CPU" if known.code is Code.TRANSFORMERS else ""
    return f"| {known.models} | {classes} | {files} | {', '.join(known.features) or 'none'} | {device} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
