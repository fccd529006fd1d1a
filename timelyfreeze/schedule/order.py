"""Schedule orders: the actions of each pipeline rank, in execution order.

An order holds compute actions only: no sends, no receives, no bubbles. Plain data, so any schedule
can be stored as text, a row per rank. Notation: S stages, M microbatches.
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise

from timelyfreeze.files import shown
from timelyfreeze.settings import key

# Ranks times microbatches: four times the largest pipeline that has been solved, 64 by 256.
MAX_CELLS = 65536


class ActionKind(Enum):
    """Computation of a stage in an action; the value is the letter in schedule text."""

    FORWARD = "F"
    FULL_BACKWARD = "B"
    INPUT_BACKWARD = "I"
    WEIGHT_BACKWARD = "W"

    @property
    def freezable(self) -> bool:
        """Whether freezing parameters shortens this kind: only weight gradients can be skipped."""
        return self in (ActionKind.FULL_BACKWARD, ActionKind.WEIGHT_BACKWARD)


@dataclass(frozen=True, slots=True)
class Action:
    """A node of the pipeline DAG, v_(a,m,s) in arXiv:2602.05754, Sec. 3.2.1.

    Attributes:
        stage: Pipeline stage, from 0.
        kind: Forward, full backward, or one half of a split backward.
        microbatch: Microbatch within the batch, from 0.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        """Text of the action, undone by ``parse_action``."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read an action from its text; the inverse of ``str(action)``.

        Args:
            text: Stage, a letter F, B, I or W, microbatch; for example ``3B5``.

        Raises:
            ValueError: If ``text`` has another form.

        Example:
            >>> Action.parse("3B5").stage, str(Action.parse("3B5"))
            (3, '3B5')
        """
        match = _ACTION_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{shown(text)} is not an action; expected <stage><F|B|I|W><microbatch>, for "
                "example 3B5"
            )
        return Action(int(match[1]), ActionKind(match[2]), int(match[3]))


# No pipeline has a billion stages; longer numbers are not worth reading.
_ACTION_TEXT = re.compile(r"(0|[1-9][0-9]{0,8})([FBIW])(0|[1-9][0-9]{0,8})")

parse_action = Action.parse


# Of an order, in a message: rows, and actions of each.
_N_ROWS, _N_ACTIONS = 8, 64


class ScheduleError(ValueError):
    """A schedule impossible to execute: actions missing, repeated or out of order."""


@dataclass(frozen=True)
class ScheduleOrder:
    """Compute actions of a batch, per rank and in execution order.

    Made and checked by ``build_order``.

    Attributes:
        ranks: A tuple of actions per pipeline rank.
    """

    ranks: tuple[tuple[Action, ...], ...]

    @property
    def n_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    @property
    def n_stages(self) -> int:
        """Number of stages S; a rank may hold several."""
        return len(self.stage_to_rank)

    @cached_property
    def n_microbatches(self) -> int:
        """Number of microbatches M in a batch."""
        return 1 + max(action.microbatch for row in self.ranks for action in row)

    @cached_property
    def stage_to_rank(self) -> tuple[int, ...]:
        """Rank of each stage, indexed by stage."""
        holder = {action.stage: rank for rank, row in enumerate(self.ranks) for action in row}
        return tuple(holder[stage] for stage in sorted(holder))


def build_order(ranks: Sequence[Sequence[Action]]) -> ScheduleOrder:
    """Check a schedule and freeze it into a ``ScheduleOrder``.

    Args:
        ranks: For each pipeline rank, its compute actions in execution order.

    Raises:
        ScheduleError: If a rank is empty; the stages are not 0..S-1, each on exactly one rank; a
            (stage, microbatch) lacks its forward or its backward (a B, or an I and a W), or repeats
            them; or a backward precedes its input on its rank. The message names rank, position and
            action, and the whole order follows it.
    """
    order = ScheduleOrder(tuple(tuple(row) for row in ranks))
    if not order.ranks:
        raise _error("the schedule has no ranks", order)
    for rank, row in enumerate(order.ranks):
        if not row:
            raise _error(f"rank {rank} has no actions; every rank must hold a stage", order)
    position = _positions(order)
    for stage in range(order.n_stages):
        for microbatch in range(order.n_microbatches):
            _check_microbatch(order, position, stage, microbatch)
    return order


def parse_order(rows: Sequence[str]) -> ScheduleOrder:
    """Read an order from a line of text per rank, actions separated by spaces.

    Args:
        rows: For each rank a text such as ``"0F0 0F1 0B0 0B1"``.

    Raises:
        ScheduleError: If a word is not an action, or the order fails ``build_order``.

    Example:
        >>> parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]).n_microbatches
        2
    """
    return build_order([_parse_cells(rank, row.split()) for rank, row in enumerate(rows)])


def order_to_csv(order: ScheduleOrder) -> str:
    """Write an order as CSV, a row per rank; undone by ``order_from_csv``."""
    return "".join(",".join(map(str, row)) + "\n" for row in order.ranks)


def order_from_csv(text: str) -> ScheduleOrder:
    """Read an order from CSV, a row per rank; the layout of torch's compute-only schedule files.

    Empty cells are bubbles and are skipped; blank lines at the end too.

    Raises:
        ScheduleError: If a cell is not an action, or the order fails ``build_order``.
    """
    try:
        rows = list(csv.reader(io.StringIO(text.rstrip())))
    except csv.Error as error:
        raise ScheduleError(
            f"{error}; a schedule read from {key('schedule_csv')} has a row of actions for each "
            "rank"
        ) from None
    return build_order([_parse_cells(rank, row) for rank, row in enumerate(rows)])


def _parse_cells(rank: int, cells: Iterable[str]) -> list[Action]:
    actions: list[Action] = []
    for position, cell in enumerate(cells):
        if not cell.strip():
            continue
        try:
            actions.append(parse_action(cell.strip()))
        except ValueError as error:
            raise ScheduleError(
                f"rank {rank}, position {position}: {error}; a schedule read from "
                f"{key('schedule_csv')} may hold compute actions only"
            ) from None
    return actions


def _error(message: str, order: ScheduleOrder) -> ScheduleError:
    """Build the error: the message, the key of the schedule, and the order.

    Long rows and many rows are shortened.
    """
    rows = [
        textwrap.fill(
            f"rank {rank}: {' '.join(map(str, row[:_N_ACTIONS]))}"
            + (" ..." if len(row) > _N_ACTIONS else ""),
            width=100,
            subsequent_indent="        ",
        )
        for rank, row in enumerate(order.ranks[:_N_ROWS])
    ]
    if len(order.ranks) > _N_ROWS:
        rows.append(f"and {len(order.ranks) - _N_ROWS} more ranks")
    grid = "\n".join(rows)
    return ScheduleError(
        f"{message} (a schedule of your own is set by {key('schedule_csv')}); the order is:\n{grid}"
    )


def _positions(order: ScheduleOrder) -> dict[Action, tuple[int, int]]:
    """Map each action to (rank, position in its row), refusing impossible actions."""
    found: dict[Action, tuple[int, int]] = {}
    holder: dict[int, int] = {}
    for rank, row in enumerate(order.ranks):
        for position, action in enumerate(row):
            wrong = None
            if action.stage < 0 or action.microbatch < 0:
                wrong = "has a negative stage or microbatch; both count from 0"
            elif action in found:
                before = "was already run by rank {}, position {}".format(*found[action])
                wrong = f"{before}; each action runs once"
            elif (held := holder.setdefault(action.stage, rank)) != rank:
                stage = f"belongs to stage {action.stage}, which rank {held} holds"
                wrong = f"{stage}; a stage lives on one rank"
            if wrong is not None:
                raise _error(f"rank {rank}, position {position}: action {action} {wrong}", order)
            found[action] = (rank, position)
    # Not by a range up to the highest: a mistyped stage may be in the millions.
    missing = next((stage for stage, known in enumerate(sorted(holder)) if stage != known), None)
    if missing is not None:
        raise _error(
            f"no rank runs stage {missing}, yet stage {max(holder)} exists; stages must count "
            "0, 1, 2, ... without a gap",
            order,
        )
    return found


def _check_microbatch(
    order: ScheduleOrder, position: dict[Action, tuple[int, int]], stage: int, microbatch: int
) -> None:
    """Check existence and order of the actions of a (stage, microbatch)."""
    forward, full, inputs, weights = (Action(stage, kind, microbatch) for kind in ActionKind)
    rank = order.stage_to_rank[stage]
    if full in position:
        chain = [forward, full]
        for extra in (inputs, weights):
            if extra in position:
                raise _error(
                    f"rank {rank}, position {position[extra][1]}: action {extra} repeats work of "
                    f"{full}; a backward is either one B or one I and one W",
                    order,
                )
    else:
        chain = [forward, inputs, weights]
    for action in chain:
        if action not in position:
            row = len(order.ranks[rank])
            raise _error(
                f"rank {rank}, positions 0 to {row - 1}: action {action} is missing; each stage "
                f"runs every microbatch 0 to {order.n_microbatches - 1} forward once and backward "
                "once (one B, or one I and one W)",
                order,
            )
    for earlier, later in pairwise(chain):
        if position[later] < position[earlier]:
            raise _error(
                f"rank {rank}, position {position[later][1]}: action {later} runs before "
                f"{earlier} (position {position[earlier][1]}), whose result it needs",
                order,
            )


def gpipe_order(n_stages: int, n_microbatches: int) -> ScheduleOrder:
    """All forwards, then all backwards, on every stage.

    Row s is F0 .. F(M-1) B0 .. B(M-1) of stage s.
    """
    _check_counts(n_stages, n_microbatches, min_microbatches=1)
    return build_order(
        [
            [
                Action(stage, kind, microbatch)
                for kind in (ActionKind.FORWARD, ActionKind.FULL_BACKWARD)
                for microbatch in range(n_microbatches)
            ]
            for stage in range(n_stages)
        ]
    )


def one_f_one_b_order(n_stages: int, n_microbatches: int) -> ScheduleOrder:
    """1F1B: fill the pipeline, then a backward for every forward, then drain.

    Stage s runs S - s forwards first, so its first backward is due just as the gradient of
    microbatch 0 arrives, and never holds the activations of more than S - s microbatches. M is S or
    more. Row s is F0 .. F(S-s-1), then B0 F(S-s) B1 F(S-s+1) .., then the last Bs.
    """
    _check_counts(n_stages, n_microbatches, min_microbatches=n_stages)
    rows = []
    for stage in range(n_stages):
        fill = n_stages - stage
        row = [Action(stage, ActionKind.FORWARD, microbatch) for microbatch in range(fill)]
        for microbatch in range(n_microbatches):
            row.append(Action(stage, ActionKind.FULL_BACKWARD, microbatch))
            if microbatch + fill < n_microbatches:
                row.append(Action(stage, ActionKind.FORWARD, microbatch + fill))
        rows.append(row)
    return build_order(rows)


def _check_counts(n_stages: int, n_microbatches: int, *, min_microbatches: int) -> None:
    if n_stages < 1:
        raise ValueError(f"the number of stages is {n_stages}; it must be at least 1")
    if n_microbatches < min_microbatches:
        raise ValueError(
            f"the number of microbatches is {n_microbatches}; this schedule with {n_stages} stages "
            f"needs at least {min_microbatches} ({key('microbatches')})"
        )


def stages_of_ranks(stage_to_rank: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the stages of each rank, front to back."""
    ranks = range(1 + max(stage_to_rank))
    return [tuple(s for s, holder in enumerate(stage_to_rank) if holder == r) for r in ranks]
