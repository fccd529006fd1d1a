"""The page of a comparison, as HTML that needs nothing but itself, and as Markdown.

Names of methods, devices and folders come from files that anyone may have written: the HTML
template escapes every text. Plots are in the page as PNG, so it can be sent as one file.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from timelyfreeze.compare.groups import NO_PLACE, Group
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.plot import KINDS, Plot
from timelyfreeze.compare.table import Table
from timelyfreeze.files import markdown_table, markdown_text

# Columns in front that hold names.
_TEXTS = frozenset({"schedule", "method", "settings", "on", "runs"})
_HEAD = """# Comparison

Mean over seeds (min..max). *gain over none* compares with the run of method none of the same
schedule and seed; throughput is that of the stable phase, for none of the whole run, and by the
virtual clock where the pipeline is emulated; so is *seconds*, the time spent in training steps and
in moves to other pipelines.
*seconds to none's loss* is the time until the running mean over {window} logged training losses is
as low as none's is at its end; *to the reference's loss*, as that of the run named below is.
*time to none's loss over none's* is the time until the loss is as low as none's at its end, over
none's total time. In both, a run of another number of steps than none counts at its end alone.
*learned* is how far the loss has come down at the end of a run, 100% being none's. It and the time
over none's are by validation losses where a run and its none have two or more, else by the running
mean of training losses.
`fewer_steps_for_X` and `fewer_microbatches_for_X` do not freeze and are given the time of X, so
what they learned and what X learned is at equal time.
*points over none* is the difference in average accuracy to the run that the gain compares with.
*time to none's accuracy over none's* is the total time over none's total time where a run's average
accuracy is at least none's, else `never`: a model is scored at its end alone.
`-`: not known."""
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip


def render_html(
    title: str, table: Table, groups: Sequence[Group], plots: Sequence[Plot],
    images: Mapping[str, bytes],
) -> str:  # fmt: skip
    """Return the page as HTML; ``images`` are PNG files by the name of their plot."""
    kinds = [[plot for plot in plots if plot.kind == kind] for kind in KINDS]
    return _TEMPLATES.get_template("page.html.j2").render(
        title=title,
        table=table,
        text_columns=_TEXTS,
        n_runs=sum(len(group.members) for group in groups),
        n_finished=sum(len(group.finished) for group in groups),
        places=list(dict.fromkeys(g.place for g in groups if g.place != NO_PLACE)),
        kinds=[alike for alike in kinds if alike],
        images={name: base64.b64encode(data).decode("ascii") for name, data in images.items()},
    )


def render_markdown(table: Table, terms: Terms, plots: Sequence[Plot] = ()) -> str:
    """Return the table with its notes, and the plots with what is not in them, as Markdown."""
    head = [_HEAD.format(window=terms.window), *map(markdown_text, table.before)]
    parts = [*head, markdown_table(table.titles, table.rows)]
    if table.notes:
        parts.append("\n".join(f"- {markdown_text(note)}" for note in table.notes))
    for plot in plots:
        parts.append(markdown_text(f"## {plot.title}, {plot.place}"))
        if plot.figure is not None:
            parts += [f"![{plot.title}]({plot.name}.png)", plot.caption]
        if plot.missing:
            parts.append(
                "\n".join(f"- not shown: {markdown_text(missing)}" for missing in plot.missing)
            )
    return "\n\n".join(parts) + "\n"
