"""Every table and figure of the paper: what it shows, which runs it needs, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from timelyfreeze.compare.paper.studies import TOLD, Study, study_of
from timelyfreeze.compare.plots import ACCURACY, MODELS

TABLE, FIGURE = "table", "figure"
# Ways to show a figure: a plot of `compare show`, or one of `draw`.
COMPARED, DRAWN = "compare", "draw"


@dataclass(frozen=True)
class Item:
    """A table or a figure of the paper."""

    kind: str  # ``TABLE`` or ``FIGURE``
    number: int  # the paper's
    title: str
    studies: tuple[Study, ...] = ()  # the runs that it is made of
    columns: tuple[str, ...] = ()  # of a table: keys of what is set beside the paper's
    plot: tuple[str, str] = ("", "")  # of a figure: who draws it, and the name of the plot
    says: str = ""  # what the paper says of it in numbers, where they are not in a table
    missing: str = ""  # why there is no such thing here

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
        for one in self.studies:
            wanted = (*(methods or one.methods), "none")
            one = replace(
                one.small() if small else one,
                schedules=tuple(s for s in one.schedules if not schedules or s in schedules),
                methods=tuple(m for m in one.methods if m in wanted),
            )
            if one.schedules and ("none" in methods or set(one.methods) != {"none"}):
                kept.append(replace(one, seeds=tuple(seeds) or one.seeds))
        return replace(self, studies=tuple(kept))

    def emulated(self) -> Item:
        """Return the item with one process and one device for all ranks of a run."""
        return replace(self, studies=tuple(replace(s, is_emulated=True) for s in self.studies))


ITEMS = tuple(
    Item(
        kind, number, told["title"], tuple(map(study_of, told.get("studies", ()))),
        tuple(TOLD["columns"].get(told.get("columns"), ())), tuple(told.get("plot", ("", ""))),
        told.get("says", ""), told.get("missing", ""),
    )
    for kind in (TABLE, FIGURE)
    for number, told in enumerate(TOLD["items"][f"{kind}s"], 1)
)  # fmt: skip
