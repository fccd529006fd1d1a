"""One page that shows a comparison: HTML that needs nothing but itself; and as markdown.

Every text is escaped: names of methods, devices and folders come from files that anyone may have
written. Plots are in the page as PNG, so it can be sent as one file.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from timelyfreeze.compare.groups import NO_PLACE, Group
from timelyfreeze.compare.plots import KINDS, Plot
from timelyfreeze.compare.table import Table

_STYLE = """
body { margin: 0 auto; max-width: 66rem; padding: 1rem; color: #1a1a1a; background: #fff;
       font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; }
h2 { margin-top: 2.5rem; font-size: 1.3rem; border-bottom: 1px solid #d9d9d9; }
h3 { margin-bottom: 0.3rem; font-size: 1.05rem; }
figure { margin: 0 0 1.5rem; }
figcaption { max-width: 48rem; color: #444; font-size: 0.92rem; }
.wide { overflow-x: auto; }
.wide img { display: block; width: 100%; min-width: 42rem; height: auto; }
.place { border-left: 0.3rem solid #d55e00; padding-left: 0.7rem; }
.missing { color: #444; font-style: italic; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid #d9d9d9; text-align: right;
         vertical-align: top; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
td.text, th.text { text-align: left; }
td, li { overflow-wrap: anywhere; }
"""
# Columns in front that hold names.
_TEXTS = frozenset({"schedule", "method", "settings", "on", "runs"})


def render_page(
    title: str,
    table: Table,
    groups: Sequence[Group],
    plots: Sequence[Plot],
    images: Mapping[str, bytes],
) -> str:
    """Return the page.

    Args:
        title: Its heading.
        table: Of means over repeats.
        groups: The repeats.
        plots: What there is to see, and what there is not.
        images: PNG files by the name of their plot.
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
            f"<title>{_text(title)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            f"<h1>{_text(title)}</h1>",
            *_overview(groups),
            *_notes(table.notes),
            *_figures(plots, images),
            "<h2>Table</h2>",
            "<p>Mean over repeats (smallest..largest); single runs are in comparison.csv, and what "
            "each column means in comparison.md. A dash: not known.</p>",
            *_table(table),
            "</body>",
            "</html>",
            "",
        ]
    )


def render_plots(plots: Sequence[Plot]) -> str:
    """Return the plots and what is not in them, as markdown."""
    lines = []
    for plot in plots:
        lines += ["", f"## {plot.title}, {plot.place}", ""]
        if plot.figure is not None:
            lines += [f"![{plot.title}]({plot.name}.png)", "", plot.caption]
        lines += [f"- not shown: {missing}" for missing in plot.missing]
    return "\n".join(lines) + "\n"


def _overview(groups: Sequence[Group]) -> Iterator[str]:
    n_runs = sum(len(group.members) for group in groups)
    n_finished = sum(len(group.finished) for group in groups)
    places = [place for place in dict.fromkeys(g.place for g in groups) if place != NO_PLACE]
    yield f"<p>{n_runs} runs, {n_finished} of them finished.</p>"
    if len(places) == 1:
        yield f"<p>All on {_text(places[0])}.</p>"
    elif places:
        yield (
            '<div class="place"><p>They were made in different places: other devices, another '
            "number of them, or another model. Each place has plots of its own, and gains are "
            "between runs of one place only.</p><ul>"
        )
        yield from (f"<li>{_text(place)}</li>" for place in places)
        yield "</ul></div>"


def _notes(notes: Iterable[str]) -> Iterator[str]:
    items = [f"<li>{_text(note)}</li>" for note in notes]
    if items:
        yield from ("<h2>What to know of these runs</h2>", "<ul>", *items, "</ul>")


def _figures(plots: Sequence[Plot], images: Mapping[str, bytes]) -> Iterator[str]:
    ordered = sorted(plots, key=lambda plot: KINDS.index(plot.kind))
    for kind, alike in groupby(ordered, key=lambda plot: plot.kind):
        same = list(alike)
        yield f'<h2 id="{_text(kind)}">{_text(same[0].title)}</h2>'
        for plot in same:
            if plot.name in images:
                if len(same) > 1:
                    yield f"<h3>{_text(plot.place)}</h3>"
                yield from _figure(plot, images[plot.name])
        for plot in same:
            if plot.name not in images:
                on = f" ({plot.place})" if len(same) > 1 else ""
                yield from (_not_shown(missing, on) for missing in plot.missing)


def _figure(plot: Plot, image: bytes) -> Iterator[str]:
    data = base64.b64encode(image).decode("ascii")
    yield "<figure>"
    yield (
        f'<div class="wide"><img alt="{_text(plot.alt)}" src="data:image/png;base64,{data}"></div>'
    )
    yield f"<figcaption>{_text(plot.caption)}</figcaption>"
    yield "</figure>"
    yield from (_not_shown(missing) for missing in plot.missing)


def _not_shown(missing: str, on: str = "") -> str:
    return f'<p class="missing">Not shown: {_text(missing + on)}.</p>'


def _table(table: Table) -> Iterator[str]:
    classes = [' class="text"' if title in _TEXTS else "" for title in table.titles]
    yield '<div class="wide"><table>'
    titles = zip(classes, table.titles, strict=True)
    heads = (f'<th scope="col"{kind}>{_text(title)}</th>' for kind, title in titles)
    yield f"<thead><tr>{''.join(heads)}</tr></thead><tbody>"
    for row in table.rows:
        cells = (f"<td{kind}>{_text(cell)}</td>" for kind, cell in zip(classes, row, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
