"""A self-contained HTML page of headings, figures, tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from chairlift.bench.report.plot import Plot
from chairlift.bench.report.sheet import Drawing, sheet
from chairlift.errors import writing
from chairlift.svg import Svg

_STYLE = """\
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #62676d; --line: #d9dce0; --paper: #fff; --card: #f5f6f8;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9; --c6: #7f7f7f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa1a9; --line: #3a3f45; --paper: #16181b; --card: #1f2226;
  --c0: #4aa8e0; --c1: #ee7f33; --c2: #2fc79b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem } p { max-width: 50rem; margin: .4rem 0 }
.dim, figcaption > span { color: var(--dim) }
.facts { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1.2rem 0 }
.facts div { background: var(--card); border-radius: 6px; padding: .5rem .9rem; min-width: 7rem }
.facts b { display: block; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums }
.facts span { color: var(--dim); font-size: .85rem }
.note { border-left: 3px solid var(--c1); padding-left: .8rem }
.plots { display: grid; margin-top: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1.6rem }
figure { margin: 0; break-inside: avoid } figcaption { min-height: 4.9em; font-size: .9rem }
figcaption b { font-size: 1rem; display: block }
.key { white-space: nowrap; margin-left: .9em } .key i { display: inline-block; width: 1.4em; margin-right: .35em; vertical-align: .25em;
  border-top: 3px solid } .key .dashes { border-top-style: dashed }
svg { width: 100%; height: auto; display: block } svg text { font-size: 11px; fill: var(--dim) }
svg path { fill: none; stroke-width: 1.7 } svg .grid { stroke: var(--line); stroke-width: 1 } svg .dashed { stroke-dasharray: 5 3 }
svg path.mark { stroke: var(--dim); stroke-dasharray: 2 3 } svg text.mark { fill: var(--ink) }
.wide { overflow-x: auto; margin-top: 1rem } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .25rem .55rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th { font-weight: 500; color: var(--dim) } th:first-child, td:first-child { text-align: left; padding-left: 0 }
tr.highlighted td { font-weight: 600; background: var(--card) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; max-width: 60rem } dt { color: var(--dim) } dd { margin: 0 }
@media print { :root { color-scheme: light } body { margin: 0; max-width: none; font-size: 11px } .plots { grid-template-columns: 1fr 1fr }
  h2 { break-after: avoid } }
"""

_COLOURS = "\n".join(
    f"svg path.c{n} {{ stroke: var(--c{n}) }} svg circle.c{n} {{ fill: var(--c{n}) }} .key .c{n} {{ border-color: var(--c{n}) }}"
    for n in range(7)
)


class Page:
    """A page. Each method appends to it; all text is escaped."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._drawings: list[Drawing] = []
        self._parts = [f"<h1>{escape(title)}</h1>", f'<p class="dim">{escape(subtitle)}</p>' if subtitle else ""]

    def heading(self, text: str) -> None:
        """Appends a heading."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Appends a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def notes(self, notes: Sequence[str]) -> None:
        """Appends highlighted sentences."""
        self._parts += [f'<p class="note">{escape(note)}</p>' for note in notes]

    def facts(self, facts: Mapping[str, str]) -> None:
        """Appends the key figures, by name."""
        tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts.items())
        self._parts.append(f'<div class="facts">{tiles}</div>')

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], highlighted: int | None = None) -> None:
        """Appends a table whose first column has names. The row `highlighted` stands out."""
        lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr>"]
        for index, row in enumerate(rows):
            mark = ' class="highlighted"' if index == highlighted else ""
            lines.append(f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
        self._parts.append(f'<div class="wide"><table>{"".join(lines)}</table></div>')

    def plots(self, plots: Sequence[Plot]) -> None:
        """Appends plots in a grid. Plots without points are left out."""
        drawn = []
        for plot in plots:
            curves = [curve for curve in plot.curves if curve.xs]
            if not curves:
                continue
            key = "".join(
                f'<span class="key"><i class="c{curve.colour % 7}{" dashes" if curve.dashed else ""}"></i>{escape(curve.name)}</span>'
                for curve in curves
                if curve.name
            )
            caption = f"<b>{escape(plot.title)}{key if len(curves) > 1 else ''}</b><span>{escape(plot.caption)}</span>"
            names = [(curve.name, curve.colour % 7) for curve in curves if curve.name] if len(curves) > 1 else []
            self._drawings.append(Drawing(plot.svg(), plot.title, plot.caption, names))
            drawn.append(f"<figure><figcaption>{caption}</figcaption>{plot.svg()}</figure>")
        self._parts.append(f'<div class="plots">{"".join(drawn)}</div>')

    def drawing(self, svg: str) -> None:
        """Appends an SVG over the whole width, without escaping."""
        self._drawings.append(Drawing(svg))
        self._parts.append(f'<div class="wide">{svg}</div>')

    def words(self, words: Mapping[str, object]) -> None:
        """Appends a list of names with descriptions or values."""
        self._parts.append(f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>' for name, value in words.items())}</dl>")

    def html(self) -> str:
        """The page as HTML."""
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(self._title)}</title>'
        body = "\n".join(part for part in self._parts if part)
        return (
            f'<!doctype html>\n<html lang="en"><head>{head}<style>\n{_STYLE}{_COLOURS}\n</style></head>\n<body>\n{body}\n</body></html>\n'
        )

    def svg(self) -> Svg:
        """The plots alone, as one SVG."""
        return Svg(sheet(self._title, self._drawings))

    def write(self, path: str | Path) -> None:
        """Writes the page, or its plots alone if the name ends in .svg or .png; raises InvalidSetting if it cannot."""
        if str(path).endswith((".svg", ".png")):
            return self.svg().write(path)
        with writing(path):
            Path(path).write_text(self.html(), encoding="utf-8")
