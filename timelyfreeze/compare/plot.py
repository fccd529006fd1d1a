"""One plot of a comparison: its kind in words, and the place whose runs it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from matplotlib import rc_context
from matplotlib.figure import Figure

from timelyfreeze.compare.drawing import Panels, by_schedule
from timelyfreeze.compare.groups import Group
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.runs.peers import freezes
from timelyfreeze.plots import style

T = TypeVar("T")
# A group, what is drawn of it, and the same in words.
Found = Sequence[tuple[Group, T, str]]
_TRADE_OFF = (
    "Better is up and to the right. Points are means over repeats, bars reach from the smallest to "
    "the largest{error}; the broad grey line joins what nothing else beats in both."
)
_ERROR = ", and at least one standard error of the questions"
ACCURACY, MODELS, VALIDATION = "accuracy_throughput", "accuracy_models", "loss_throughput"
LOSSES, TOP1 = "loss_seconds", "top1_seconds"
RATIOS, STAGES = "freeze_ratio_steps", "freeze_ratio_stages"
HISTOGRAM, TIMELINES = "freeze_ratio_histogram", "timelines"

# Title and caption by kind.
WORDS = {
    ACCURACY: ("Accuracy against throughput", _TRADE_OFF.format(error=_ERROR)),
    MODELS: (
        "Accuracy against throughput of each model",
        _TRADE_OFF.format(error=_ERROR) + " A model has axes of its own, and a panel for each "
        "schedule.",
    ),
    VALIDATION: ("Validation loss against throughput", _TRADE_OFF.format(error="")),
    LOSSES: (
        "Loss against seconds of training",
        "Lines: running mean over {window} logged training losses, mean over repeats, with a band "
        "from the smallest to the largest. Small points: validation losses. What lies above the "
        "axes is of the first fifth of the training; losses that are no numbers are left out. "
        "Seconds are those spent in training steps, of an emulated pipeline by its virtual clock, "
        "and in moves to other pipelines.",
    ),
    TOP1: (
        "Top-1 against seconds of training",
        "Share of the validation pictures whose class had the highest score, at each validation, "
        "mean over repeats with a band from the smallest to the largest; a point is where runs of "
        "fewer steps or microbatches end, in the mean. What lies outside the "
        "axes is of the first fifth of the training. Seconds are those spent in training steps; of "
        "an emulated pipeline, by its virtual clock.",
    ),
    RATIOS: (
        "Freeze ratio over steps",
        "Fraction of the elements of all weights whose update was left out, step by step, mean "
        "over repeats with a band from the smallest to the largest.",
    ),
    STAGES: (
        "Freeze ratio of each stage",
        "As applied in the last step, mean over repeats: fraction of the elements whose update was "
        "left out.",
    ),
    HISTOGRAM: (
        "How often tensors were frozen",
        "Tensors of the last rank by the fraction of backwards, since freezing began, that left "
        "them out. Of each method the first seed is shown.",
    ),
    TIMELINES: (
        "Timelines of one batch",
        "A lane is a rank, a block an action with the number of its microbatch; the paler a "
        "backward, the more of it is frozen, and grey is waiting; what is left out whole takes "
        "next to no time, and hardly shows. Of each method the first seed is shown, by a typical "
        "batch of its last ones; gains are of this one batch, in the table they are of all. A run "
        "of none measures no batch: the one shown is of a run that freezes, from before it did.",
    ),
}
KINDS = tuple(WORDS)


@dataclass(frozen=True)
class Plot:
    """One plot, or why there is none.

    Attributes:
        kind: One of ``KINDS``.
        title: What it shows.
        place: Of the runs in it, behind their schedule where it is of one alone.
        caption: How to read it.
        alt: What it says, for those who do not see it.
        figure: None if no run has the data.
        missing: What is not in it, and why; a sentence each.
        number: Among the plots of its kind, from 1.
    """

    kind: str
    title: str
    place: str
    caption: str
    alt: str
    figure: Figure | None
    missing: tuple[str, ...] = ()
    number: int = 1

    @property
    def name(self) -> str:
        """Of its files, without ending."""
        return self.kind if self.number == 1 else f"{self.kind}_{self.number}"


@dataclass(frozen=True)
class Place:
    """The runs of a place, and what their plots have in common.

    Attributes:
        name: Devices and model.
        groups: Its runs.
        terms: Of the comparison.
    """

    name: str
    groups: Sequence[Group]
    terms: Terms

    @property
    def model(self) -> str:
        """The model of its runs."""
        return self.groups[0].runs[0].summary.model

    @property
    def devices(self) -> str:
        """The name without the model."""
        return self.name.removesuffix(f", {self.model}")

    @property
    def freezing(self) -> list[Group]:
        """The runs that freeze."""
        return [group for group in self.groups if freezes(group.method)]

    def plot(
        self,
        kind: str,
        found: Found[T],
        draw: Callable[[Panels[T], str, str], Figure],
        missing: tuple[str, ...],
        schedule: str = "",
    ) -> Plot:
        """Return a plot of what was ``found``, of one ``schedule`` if that is given."""
        title, caption = WORDS[kind]
        where = f"{schedule}, {self.name}" if schedule else self.name
        caption = caption.format(window=self.terms.window)
        told = "; ".join(f"{group.schedule} {group.name}{words}" for group, _, words in found)
        panels = by_schedule([(group, one) for group, one, _ in found])
        # Names are no formulas, whatever signs they have.
        with style.house_style(), rc_context({"text.parse_math": False}):
            figure = draw(panels, title, where) if found else None
        alt = f"{title}. {told}."
        return Plot(kind, title, where, caption, alt, figure, missing)


def without(groups: Sequence[Group], found: Found[Any], what: str) -> tuple[str, ...]:
    """Return a sentence that names the groups that lack ``what`` is drawn."""
    if not found:
        return (f"no run has {what}",)
    drawn = [group for group, *_ in found]
    names = [f"{g.schedule} {g.name}" for g in groups if g not in drawn and g.runs]
    return (f"without {what}: {', '.join(names)}",) if names else ()
