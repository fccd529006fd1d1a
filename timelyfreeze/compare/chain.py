"""A chain of links from TorchTitan's keys to ours: its table, and its waterfall.

Times are of a step, for the same number of rows. A ratio is over the link before, in the same turn;
a share is the product of ratios, over the first link.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from timelyfreeze.compare.groups import Spread
from timelyfreeze.compare.metrics import NEVER, Criteria, row_of
from timelyfreeze.compare.runs.links import (
    BATCH,
    METHOD,
    PARTITION,
    SCHEDULE,
    Link,
    Packed,
    link_folder,
)
from timelyfreeze.compare.runs.run import Run, finished_run
from timelyfreeze.files import markdown_table
from timelyfreeze.plots import style

_TITLES = (
    "link", "keys", "learned tokens/s", "time for the same rows over the link before",
    "over the first", "held-out loss", "time to the loss over the first", "peak memory, GiB",
)  # fmt: skip
_UNKNOWN = "-"


@dataclass(frozen=True)
class LinkRow:
    """A link as measured."""

    link: Link
    runs: Mapping[int, Run]  # by seed
    keys: Mapping[str, Any]  # those that it sets over the link before, chosen ones included
    seconds: float  # of a step over its rows, the median of turns
    ratio: Spread  # time for the same rows, over the link before: the median of turns
    share: float  # the product of the ratios
    # Share in which the loss of the link before comes, where weights are frozen; without, the same
    # rows teach the same. ``never``, or None if unknown.
    to_loss: float | str | None


def link_rows(
    links: Mapping[str, Link], output: Path, seeds: Sequence[int], packed: Packed
) -> list[LinkRow]:
    """Return the links with runs in ``output``, in turns that the link before has, too."""
    rows: dict[str, LinkRow] = {}
    for name, link in links.items():
        found = {seed: finished_run(output / link_folder(name, seed)) for seed in seeds}
        base = rows.get(link.over)
        runs = {seed: run for seed, run in found.items()
                if run and (not link.over or (base and seed in base.runs))}  # fmt: skip
        if not runs:
            continue
        seconds = {seed: row_seconds(run, packed) for seed, run in runs.items()}
        befores = {seed: row_seconds(base.runs[seed], packed) for seed in runs} if base else seconds
        ratios = [seconds[seed] / befores[seed] for seed in runs]
        ratio = Spread(statistics.median(ratios), min(ratios), max(ratios))
        share = ratio.mean * (base.share if base else 1.0)
        to_loss = _to_loss(runs, base) if base and link.keys[METHOD] != "none" else share
        typical = statistics.median(seconds.values())
        before = next(iter(base.runs.values())).settings if base else {}
        keys = {
            key: value
            for key, value in next(iter(runs.values())).settings.items()
            if key in (*link.keys, SCHEDULE, PARTITION) and before.get(key) != value
        }
        rows[name] = LinkRow(link, runs, keys, typical, ratio, share, to_loss)
    return list(rows.values())


def row_seconds(run: Run, packed: Packed) -> float:
    """Return the seconds of a step over its rows, by the virtual clock where there is one."""
    told = run.summary.by_virtual_clock()
    if told.step_ms is None:
        raise ValueError(f"{run.folder} has no step behind its first two; raise --short")
    n = int(run.settings[BATCH]) * told.batches_per_step
    return told.step_ms / 1e3 / (n * packed.rows if told.packing else n)


def _to_loss(runs: Mapping[int, Run], base: LinkRow) -> float | str | None:
    found = [row_of(run, base.runs[seed], Criteria()) for seed, run in runs.items()]
    # Of held-out losses alone, where both runs have two or more.
    known = [row["time_ratio"] for row in found if row.get("loss_over_none") is not None]
    if NEVER in known:
        return NEVER
    numbers = [one for one in known if isinstance(one, float)]
    return base.share * statistics.fmean(numbers) if numbers else None


def render_chain(rows: Sequence[LinkRow], packed: Packed) -> str:
    """Return the table with its notes, as Markdown."""
    run = next(iter(rows[0].runs.values()))
    return f"""# From a plain run to ours

{markdown_table(_TITLES, (_cells(row, packed) for row in rows))}

- {run.place}; turns: {max(len(row.runs) for row in rows)}; medians over turns (min..max)
- a packed sequence of {run.settings["training.seq_len"]} tokens holds {packed.rows:.2f} rows and \
{packed.targets:.0f} learned tokens; {run.settings[BATCH]} sequences in a batch of the first link
"""


def _cells(row: LinkRow, packed: Packed) -> tuple[str, ...]:
    runs, ratio, to_loss = list(row.runs.values()), row.ratio, row.to_loss

    def told(name: str) -> list[float]:
        values = (getattr(run.summary, name) for run in runs)
        return [value for value in values if value is not None]

    losses, errors, peaks = map(told, ("validation_loss", "validation_error", "peak_memory_gib"))
    loss = f"{statistics.fmean(losses):.4f}" if losses else _UNKNOWN
    return (
        f"{row.link.title} ({row.link.name})",
        ", ".join(f"{key} = {json.dumps(value)}" for key, value in row.keys.items()),
        f"{packed.targets / packed.rows / row.seconds:,.1f}",
        f"{ratio.mean:.3f} ({ratio.low:.3f}..{ratio.high:.3f})" if row.link.over else _UNKNOWN,
        f"{row.share:.3f}",
        f"{loss} +- {statistics.fmean(errors):.4f}" if errors else loss,
        f"{to_loss:.3f}" if isinstance(to_loss, float) else to_loss or _UNKNOWN,
        f"{max(peaks):.2f}" if peaks else _UNKNOWN,
    )


def chain_figure(rows: Sequence[LinkRow]) -> Figure:
    """Draw the share of the first link's time that each link leaves, and what it has saved."""
    shares = {row.link.name: row.share for row in rows}
    with style.house_style():
        height = 1.1 + 0.42 * len(rows)
        figure = Figure(figsize=(style.WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots()
        for i, row in enumerate(rows):
            start = shares.get(row.link.over, 1.0)
            is_other = i > 0 and row.link.over != rows[i - 1].link.name
            color = style.OLIVE if is_other else style.BLUE
            axes.barh(i, row.share, color=color, height=0.62)
            change = style.GRID if row.share <= start else style.VERMILLION
            axes.barh(i, start - row.share, left=row.share, color=change, height=0.62)
            saved = f"   x {row.ratio.mean:.2f}" if row.link.over else ""
            style.annotate(axes, f"{row.share:.0%}{saved}", (max(start, row.share), i), "data",
                           shift=(4, -3), color=style.INK)  # fmt: skip
        axes.set_yticks(range(len(rows)), [row.link.title for row in rows])
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0.0, 1.12))
        axes.set_xlabel(
            "time for the same rows, over the first; grey: saved by the link, red: lost"
        )
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.tick_params(axis="y", length=0)
        place = next(iter(rows[0].runs.values())).place
        figure.suptitle(f"From a plain run to ours\n{place}", x=0.01, ha="left")
    return figure
