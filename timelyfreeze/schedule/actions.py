"""Actions: one piece of work of one pipeline stage on one microbatch.

An action prints as ``3B5`` (stage 3, full backward, microbatch 5) and that text parses back. The
letters are those of ``torch.distributed.pipelining``, so schedules travel between the two as text.
Stages and microbatches count from 0 here; the paper counts them from 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from timelyfreeze.files import shown


class ActionKind(Enum):
    """What a stage computes in an action; the value is the letter used in schedule text."""

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
    """One node of the pipeline DAG, v_(a,m,s) in arXiv:2602.05754, Sec. 3.2.1.

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


# No pipeline has a billion stages; longer numbers are not worth reading.
_ACTION_TEXT = re.compile(r"(0|[1-9][0-9]{0,8})([FBIW])(0|[1-9][0-9]{0,8})")


def parse_action(text: str) -> Action:
    """Read an action from its text; the inverse of ``str(action)``.

    Args:
        text: Stage, one of the letters F, B, I, W, microbatch; for example ``3B5``.

    Raises:
        ValueError: If ``text`` has another form.

    Example:
        >>> parse_action("3B5").stage, str(parse_action("3B5"))
        (3, '3B5')
    """
    match = _ACTION_TEXT.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{shown(text)} is not an action; expected <stage><F|B|I|W><microbatch>, for example "
            "3B5"
        )
    return Action(int(match[1]), ActionKind(match[2]), int(match[3]))
