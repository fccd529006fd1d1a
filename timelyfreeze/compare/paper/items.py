"""Every table and figure of the paper: what it shows, which runs it needs, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from timelyfreeze.compare.paper.studies import (
    CONVNEXT,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_13B,
    METHODS,
    SCORES,
    SPEEDS,
    TOP1,
    VIT,
    Study,
    controls,
    more_ranks,
    single,
)
from timelyfreeze.compare.plot import ACCURACY, HISTOGRAM, MODELS, TIMELINES

TABLE, FIGURE = "table", "figure"
# Ways to show a figure: a plot of `compare show`, or one of `draw`.
COMPARED, DRAWN = "compare", "draw"


@dataclass(frozen=True)
class Item:
    """A table or a figure of the paper.

    Attributes:
        kind: ``table`` or ``figure``.
        number: The paper's.
        title: What it shows.
        studies: The runs it is made of; none where it is of no run.
        columns: Of a table: keys of what is set beside the paper's.
        plot: Of a figure: who draws it, and the name of the plot.
        says: What the paper says of it in numbers, where they are not in a table.
        missing: Why there is no such thing here.
    """

    kind: str
    number: int
    title: str
    studies: tuple[Study, ...] = ()
    columns: tuple[str, ...] = ()
    plot: tuple[str, str] = ("", "")
    says: str = ""
    missing: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        """Kind and number."""
        return f"{self.kind} {self.number}"

    @property
    def shows_accuracy(self) -> bool:
        """Whether it shows accuracies, for which runs are scored."""
        return "accuracy" in self.columns or self.plot[1] in (ACCURACY, MODELS)

    def narrowed(
        self, schedules: Sequence[str], methods: Sequence[str], seeds: Sequence[int], *, small: bool
    ) -> Item:
        """Return the item with runs of these alone; an empty sequence stands for all.

        None stays with the methods, since gains are over it.

        Raises:
            ValueError: If it has no run of a schedule or method.
        """
        known = {name for s in self.studies for name in (*s.schedules, *s.methods)}
        if unknown := [name for name in (*schedules, *methods) if name not in known]:
            raise ValueError(
                f"{self.name} has no run of {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        kept = []
        for study in self.studies:
            one = replace(
                study.small() if small else study,
                schedules=tuple(s for s in study.schedules if not schedules or s in schedules),
                methods=tuple(
                    m for m in study.methods if m in (*(methods or study.methods), "none")
                ),
            )
            if one.schedules and ("none" in methods or set(one.methods) != {"none"}):
                kept.append(replace(one, seeds=tuple(seeds) or one.seeds))
        return replace(self, studies=tuple(kept))

    def emulated(self) -> Item:
        """Return the item with one process and one device for all ranks of a run."""
        studies = tuple(replace(study, is_emulated=True) for study in self.studies)
        return replace(self, studies=studies)


_DRAWING = "no runs are in it; `timelyfreeze draw RUN` draws such batches of a run"
_SHOWN = ("none", "autofreeze", "apf", "timelyfreeze")


def _results(number: int, study: Study, columns: tuple[str, ...], what: str) -> Item:
    return Item(TABLE, number, f"{what} of six methods, {study.model}", (study,), columns)


def _timelines(number: int, schedule: str, study: Study, says: str = "") -> Item:
    title = f"batches of {len(study.methods)} methods, {schedule}, {study.n_ranks} ranks"
    return Item(
        FIGURE, number, f"{title}, {study.model}", (study,), plot=(COMPARED, TIMELINES), says=says
    )


_FASTER = "under all, TimelyFreeze has the shortest batch"
ITEMS = (
    _results(1, LLAMA_8B, SPEEDS, "accuracy and speed"),
    Item(TABLE, 2, "notation", missing="words and signs are in docs/glossary.md"),
    Item(TABLE, 3, "settings of each model", (LLAMA_1B, LLAMA_8B, LLAMA_13B)),
    _results(4, LLAMA_1B, SPEEDS, "accuracy and speed"),
    _results(5, LLAMA_13B, SPEEDS, "accuracy and speed"),
    _results(6, LLAMA_1B, SCORES, "scores"),
    _results(7, LLAMA_8B, SCORES, "scores"),
    _results(8, LLAMA_13B, SCORES, "scores"),
    Item(TABLE, 9, "ConvNeXt-V2-L on Food-101 under three partitions", CONVNEXT, TOP1),
    Item(TABLE, 10, "ViT-L/32 on ImageNet", (VIT,), TOP1),
    *(Item(FIGURE, number, "a drawing of the idea", missing=_DRAWING) for number in (1, 2, 3)),
    Item(
        FIGURE, 4, "freeze ratio and tokens/s over the steps of a run",
        (single(LLAMA_1B, "timelyfreeze"),), plot=(DRAWN, "curves"),
    ),
    Item(
        FIGURE, 5, "accuracy against throughput, a panel for each model",
        (LLAMA_1B, LLAMA_8B, LLAMA_13B), plot=(COMPARED, MODELS),
        says="up to +19 to 21% for 1B, +46% for 13B, accuracy within a point of no freezing",
    ),
    Item(
        FIGURE, 6, "accuracy against throughput for several values of each method's control",
        controls(), plot=(COMPARED, ACCURACY),
        says="tokens/s falls with r_max and accuracy hardly changes; it recommends 0.5 to 0.8",
    ),
    _timelines(
        7, "GPipe", single(LLAMA_8B, *_SHOWN, schedule="GPipe"),
        "TimelyFreeze takes 31.66% off a batch of 698 ms",
    ),
    _timelines(8, "1F1B", single(LLAMA_8B, *_SHOWN), _FASTER),
    _timelines(
        9, "Interleaved1F1B", single(LLAMA_8B, *_SHOWN, schedule="Interleaved1F1B"), _FASTER
    ),
    _timelines(10, "ZBVZeroBubble", single(LLAMA_8B, *_SHOWN, schedule="ZBVZeroBubble"), _FASTER),
    _timelines(
        11, "GPipe", more_ranks(6, "GPipe", *_SHOWN),
        "TimelyFreeze gains up to 10 points more than APF, with four ranks 6 to 7",
    ),
    _timelines(12, "1F1B", more_ranks(6, "1F1B", "none", "apf", "timelyfreeze")),
    _timelines(13, "GPipe", more_ranks(8, "GPipe", "none", "apf", "timelyfreeze")),
    Item(
        FIGURE, 14, "how often each tensor of the last rank is frozen, by method",
        (single(LLAMA_1B, *METHODS),), plot=(COMPARED, HISTOGRAM),
        says="TimelyFreeze nearly uniform, APF skewed, AutoFreeze by layers, hybrids in between",
    ),
    Item(
        FIGURE, 15, "backward time against freeze ratio, by stage",
        (single(LLAMA_1B, "timelyfreeze"),), plot=(DRAWN, "response"),
        says="the time falls in proportion to the ratio",
    ),
)  # fmt: skip
