"""Runs a policy along the steps: measures, exchanges and lets it decide when a check is due.

Scores are global over the pipeline: at a check every rank measures its own tensors, one all-gather
of a few numbers per tensor makes them known to all, and every rank applies the rule to the same
numbers. So all ranks hold the same decision without any of them being in charge.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from timelyfreeze.control.replica_states import begin_anew
from timelyfreeze.policies import Check, Decision, FreezePolicy, Metric, ModelLayout, build_layout
from timelyfreeze.runtime import ChangeMeter, Clock, Exchange, FreezingStage
from timelyfreeze.settings import HOST, FreezeSettings, Phase, PhaseSchedule, key

logger = logging.getLogger(__name__)


class PolicyChecks:
    """The decision of a policy, kept up to date.

    Checks come every ``policy.check_interval`` steps after warm-up; steps of the lower-bound half
    of monitoring change no weights and do not count.

    Args:
        policy: The rule.
        layout: The tensors of all stages.
        parameters: Names, as in ``layout``, and values of this rank's tensors.
        exchange: Talks to the other ranks.
        phases: Boundaries of the run.
        meter: Measures ``parameters`` as the policy wants; None if it wants nothing.
        clock: Times the scoring.
        seed: For policies that draw.

    Raises:
        ValueError: If the policy's settings are wrong or it refuses the model.
    """

    def __init__(
        self,
        policy: FreezePolicy,
        layout: ModelLayout,
        parameters: Sequence[tuple[str, Tensor]],
        exchange: Exchange,
        phases: PhaseSchedule,
        meter: ChangeMeter | None,
        clock: Clock,
        seed: int,
    ) -> None:
        errors = list(policy.errors())
        if errors:
            raise ValueError("; ".join(errors))
        self._policy = policy
        self.layout = layout
        position = {name: i for i, name in enumerate(layout.names)}
        self._positions = [position[name] for name, _ in parameters]
        self._exchange = exchange
        self._phases = phases
        self._meter = meter
        self._clock = clock
        self._seed = seed
        self.decision = policy.start(Check(0, layout, {}, seed))
        self._measured: Mapping[Metric, NDArray[np.float64]] = {}
        self._marks: list[tuple[Any, Any]] = []
        self._step = 0
        self._has_begun = False
        self._n_steps_timed = 0

    def begin_step(self, step: int) -> None:
        """Begin the first interval where warm-up has ended, or where the run resumed without it."""
        self._step = step
        self._n_steps_timed += 1
        first = self._phases.last_warmup_step + 1
        if self._meter is None or step < first:
            return
        if step == first or not self._has_begun:
            with self._timed():
                self._meter.begin()
        self._has_begun = True

    def end_step(self, frequency: NDArray[np.float64]) -> None:
        """Take note of the step that has just changed the weights; check where one is due.

        Args:
            frequency: Fraction of the step's backwards that updated each of this rank's tensors.
        """
        n = self._phases.learning_steps(self._step)
        if n == 0 or self._phases.phase(self._step) is Phase.LOWER_BOUND:
            return
        if self._meter is not None:
            with self._timed():
                self._meter.add_step(frequency)
        if n % self._policy.check_interval == 0:
            self._decide(n // self._policy.check_interval)

    def _decide(self, number: int) -> None:
        metrics: Mapping[Metric, NDArray[np.float64]] = {}
        if self._meter is not None:
            with self._timed():
                mine = self._meter.take()
            metrics = self._gather(mine)
        before = self.decision
        self.decision = self._policy.decide(before, Check(number, self.layout, metrics, self._seed))
        if self.decision.frozen.all() and not before.frozen.all() and self._exchange.rank == 0:
            logger.warning(
                "From step %d on every tensor is frozen by %r: the model learns nothing until some "
                "are live again",
                self._step + 1,
                self._policy,
            )

    def _gather(
        self, mine: Mapping[Metric, list[float | None]]
    ) -> dict[Metric, NDArray[np.float64]]:
        """Exchange the metrics of all ranks; replicas, which have the same, may repeat them.

        What nobody could measure stays as it was at the check before.
        """
        everyone = self._exchange.all_gather(
            (self._positions, {metric.value: values for metric, values in mine.items()})
        )
        metrics: dict[Metric, NDArray[np.float64]] = {}
        for metric in mine:
            unknown = np.full(len(self.layout.names), np.nan)
            metrics[metric] = self._measured.get(metric, unknown).copy()
            # From the last rank to the first, whose numbers count, so that replicas agree to the
            # last bit.
            for positions, values in reversed(everyone):
                for position, value in zip(positions, values[metric.value], strict=True):
                    if value is not None:
                        metrics[metric][position] = value
        self._measured = metrics
        return metrics

    # -- what was decided --------------------------------------------------------------------------

    def frozen(self, stage: int) -> NDArray[np.bool_]:
        """Return which tensors of ``stage`` the policy freezes, bool, in the stage's order."""
        return self.decision.frozen[self.layout.of_stage(stage)]

    def frozen_ratio(self, stage: int) -> float:
        """Return which fraction of the elements of ``stage`` the policy freezes."""
        sizes = self.layout.sizes[self.layout.of_stage(stage)]
        return float(sizes[self.frozen(stage)].sum() / sizes.sum())

    @property
    def first_live_stage(self) -> int:
        """The first stage that has a live tensor; the number of stages if everything is frozen."""
        live = self.layout.stages[~self.decision.frozen]
        return int(live.min()) if live.size else int(self.layout.stages.max()) + 1

    # -- what it costs -----------------------------------------------------------------------------

    @property
    def n_bytes(self) -> int:
        """Memory that scoring takes on this rank."""
        return 0 if self._meter is None else self._meter.n_bytes

    def take_ms_per_step(self) -> float:
        """Return the mean time a step spent on scoring since the last call, milliseconds."""
        marks, self._marks = self._marks, []
        n_steps, self._n_steps_timed = self._n_steps_timed, 0
        if marks:
            self._clock.wait(marks[-1][1])
        total_ms = sum(self._clock.elapsed_ms(start, end) for start, end in marks)
        return total_ms / n_steps if n_steps else 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self._marks.append((start, self._clock.mark()))

    # -- checkpoint --------------------------------------------------------------------------------

    def plain_state(self) -> dict[str, Any]:
        """Return the decision as plain data."""
        return {
            "policy": repr(self._policy),
            "frozen": np.flatnonzero(self.decision.frozen).tolist(),
            "memory": dict(self.decision.memory),
            "metrics": dict(self.decision.metrics),
            "measured": {
                metric.value: [None if np.isnan(value) else value for value in row.tolist()]
                for metric, row in self._measured.items()
            },
        }

    def load_plain_state(self, plain: Mapping[str, Any]) -> None:
        """Restore what :meth:`plain_state` returned.

        Raises:
            ValueError: If another policy decided, or the same with other settings.
        """
        if plain["policy"] != repr(self._policy):
            raise ValueError(
                f"the checkpoint has a decision of {plain['policy']}, this run has "
                f"{self._policy!r}; resume with the same {key('method')} and settings, or, "
                f"{begin_anew()}"
            )
        frozen = np.zeros(len(self.layout.names), dtype=np.bool_)
        frozen[plain["frozen"]] = True
        self.decision = Decision(frozen, plain["memory"], plain["metrics"])
        self._measured = {
            Metric(name): np.array(row, dtype=np.float64) for name, row in plain["measured"].items()
        }

    def tensor_state(self) -> dict[str, Tensor]:
        """Return the vectors the scores are made from."""
        return {} if self._meter is None else self._meter.state_dict()

    def load_tensor_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`tensor_state` returned."""
        if self._meter is not None:
            self._meter.load_state_dict(tensors)
            self._has_begun = True


def checks_for(
    stages: Sequence[FreezingStage],
    policy: FreezePolicy,
    settings: FreezeSettings,
    exchange: Exchange,
    clock: Clock,
) -> PolicyChecks:
    """Set up a policy for a rank's stages, recorders attached; every rank must call this together.

    Everyone's names and sizes are exchanged once here; ``clock`` times the scoring.

    Raises:
        ValueError: As :class:`PolicyChecks` and :func:`timelyfreeze.policies.layout.build_layout`.
    """
    mine = {
        stage.stage_index: list(
            zip(stage.parameter_names, stage.parameter_sizes.tolist(), strict=True)
        )
        for stage in stages
    }
    layout = build_layout(
        {s: tensors for rank in exchange.all_gather(mine) for s, tensors in rank.items()}
    )
    parameters = [named for stage in stages for named in stage.named_stage_parameters()]
    meter = None
    if policy.measurement is not None:
        meter = ChangeMeter(
            parameters,
            policy.measurement,
            on_host=settings.score_memory == HOST,
            dtype=getattr(torch, settings.score_dtype),
        )
    return PolicyChecks(
        policy, layout, parameters, exchange, settings.phases, meter, clock, settings.seed
    )
