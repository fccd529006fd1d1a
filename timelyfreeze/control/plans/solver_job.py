"""A plan in the making: rank 0 solves, all ranks take the answer at the end of the same step."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from timelyfreeze.planning import (
    AwaitedCall,
    BackgroundCall,
    BackgroundError,
    LpError,
    Solution,
    solution_from_plain,
    solution_to_plain,
)
from timelyfreeze.runtime import Exchange
from timelyfreeze.settings import key

logger = logging.getLogger(__name__)

# Up to here solving takes two seconds at most, all caps tried, so training may as well wait for it.
MOST_ACTIONS_AT_ONCE = 1024


def automatic_delay(n_actions: int, n_ramp_steps: int) -> int:
    """Return the default number of steps until a plan is taken.

    0 for a pipeline solved in a moment. Otherwise a tenth of the ramp, at least 1, with small
    ratios anyway; but never all of its T_f - T_m steps.
    """
    if n_actions <= MOST_ACTIONS_AT_ONCE:
        return 0
    return min(max(1, n_ramp_steps // 10), n_ramp_steps - 1)


@dataclass
class SolverJob:
    """A call of a plan-making function; all ranks make the call at the same step.

    The number of steps in between is fixed, not "as soon as ready": all ranks have to begin at the
    same step, and so has a repeated run.
    """

    exchange: Exchange  # talks to the other ranks
    due_step: int  # at its end all ranks take the answer
    # whether training does nothing but wait for the answer
    is_awaited: bool
    # returns a solution; a function of a module, with arguments that pickle
    function: Callable[..., Solution]
    arguments: Mapping[str, Any] | None  # keyword arguments for it; None on ranks that do not solve
    # how long training waits at most for that process, once the answer is due; seconds
    patience_s: float

    def __post_init__(self) -> None:
        """Begin, in a separate process: its death or hang harms no rank."""
        self._background: BackgroundCall[Solution] | None = None
        self._failure = ""
        if self.arguments is not None:
            try:
                kind = AwaitedCall if self.is_awaited else BackgroundCall
                self._background = kind(self.function, **self.arguments)
            except OSError as error:
                self._failure = f"no process for the solver could be started: {error}"

    def take(self) -> Solution | str:
        """Wait for the answer, or the reason of a failure; a collective call of all ranks."""
        answer: dict[str, str] = {}
        if self.arguments is not None:
            try:
                answer = solution_to_plain(self._solve())
            except (LpError, ValueError, BackgroundError, MemoryError) as error:
                answer = {"failure": str(error) or type(error).__name__}
        answer = self.exchange.broadcast(answer)
        if "failure" in answer:
            return answer["failure"]
        return solution_from_plain(answer)

    def _solve(self) -> Solution:
        if self._background is None:
            raise BackgroundError(self._failure)
        began = time.monotonic()
        was_done = self.is_awaited or self._background.done
        with self._background as call:
            if not was_done:
                call.hurry()  # the lowest priority may get next to nothing beside other work
            solution = call.result(self.patience_s)
        if not was_done:
            logger.warning(
                "Training waited %.1f s for its plan; %s gives the solver more steps",
                time.monotonic() - began,
                key("solver_delay_steps"),
            )
        return solution

    def cancel(self) -> None:
        """End the solver, if still running in the background."""
        if self._background is not None:
            self._background.cancel()
            self._background = None
