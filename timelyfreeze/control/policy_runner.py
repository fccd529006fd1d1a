"""Runs a policy along the steps: measures, exchanges and lets it decide when a check is due.

Scores are global over the pipeline: at a check every rank measures its own tensors, one all-gather
of a few numbers per tensor makes them known to all, and every rank applies the rule to the same
numbers. So all ranks hold the same decision without any of them being in charge.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from timelyfreeze.policies import (
    Check,
    Compared,
    ComparesOutputs,
    Decision,
    FreezePolicy,
    Metric,
    ModelLayout,
    together,
)
from timelyfreeze.runtime import Clock, Exchange, StepPart
from timelyfreeze.runtime.meters import ChangeMeter
from timelyfreeze.runtime.reference.comparator import OutputComparator
from timelyfreeze.settings import Phase, Step, begin_anew, key

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PolicyRunner(StepPart):
    """The decision of a policy, kept up to date.

    Checks come every ``policy.check_interval`` steps after warm-up; steps of the lower-bound half
    of monitoring change no weights and do not count.
    """

    policy: FreezePolicy  # the rule
    layout: ModelLayout  # tensors of all ranks
    parameters: Sequence[tuple[str, Tensor]]  # of this rank, with their names in the layout
    exchange: Exchange  # talks to the other ranks
    meter: ChangeMeter | None  # measures what the policy judges by; None if it needs nothing
    clock: Clock  # times the scoring
    seed: int  # of the policy's draws
    watch: OutputComparator | None = None  # for a policy that compares outputs
    # fraction of the step's backwards that updated each of the rank's tensors
    frequency: Callable[[], NDArray[np.float64]] = lambda: np.ones(0)
    # Frozen layers in front that the pipeline should be made for: the policy's choice, none in
    # warm-up. It stays while times are measured and the plan takes effect: a plan is used first.
    settled_front = 0
    name, prefix = "policy", "score."

    def __post_init__(self) -> None:
        """Begin with what the policy has decided before any check."""
        errors = list(self.policy.errors())
        if errors:
            raise ValueError("; ".join(errors))
        position = {name: i for i, name in enumerate(self.layout.names)}
        self._positions = [position[name] for name, _ in self.parameters]
        # what the policy has decided last
        self.decision = self.policy.start(Check(0, self.layout, {}, self.seed))
        self._measured: Mapping[Metric, NDArray[np.float64]] = {}
        self._marks: list[tuple[Any, Any]] = []
        self._step = Step()
        self._has_begun = False
        self._n_steps_timed = 0

    def begin_step(self, step: Step) -> None:
        """Begin the first interval where warm-up has ended, or where the run resumed without it."""
        if step.phase is Phase.OFF:
            return
        self._step = step
        self._n_steps_timed += 1
        if self.watch is not None:
            self._timed(
                self.watch.begin_step, step.number, counts=self._counts, is_due=self.decides
            )
        if self.meter is None or step.after_warmup < 1:
            return
        is_first = step.after_warmup == step.learning_steps == 1  # no phases begun again
        if is_first or not self._has_begun:
            self._timed(self.meter.begin)
        self._has_begun = True

    def record_tokens(self, n_tokens: Tensor) -> None:
        """As :meth:`OutputComparator.record_tokens`, of the step's next batch."""
        if self.watch is not None:
            self.watch.record_tokens(n_tokens)

    def end_step(self, step: Step) -> None:
        """Take note of a step's updates; check where that is due."""
        if self._counts and step.phase is not Phase.OFF:
            self._end_learning()
        if step.precedes_stable and step.phase is not Phase.RAMP:
            self.settled_front = self.frozen_layers

    def _end_learning(self) -> None:
        if self.meter is not None:
            self._timed(self.meter.add_step, self.frequency())
        if self.watch is not None:
            self._timed(self.watch.end_step)
        if self.decides:
            self._decide(self._step.learning_steps // self.policy.check_interval)

    @property
    def decides(self) -> bool:
        """Whether the policy decides again at the end of the current step."""
        return self._counts and self._step.learning_steps % self.policy.check_interval == 0

    @property
    def _counts(self) -> bool:
        """Whether the current step is one of those that checks come after so many of."""
        return self._step.learning_steps > 0 and self._step.changes_weights

    def _decide(self, number: int) -> None:
        metrics: Mapping[Metric, NDArray[np.float64]] = {}
        if self.meter is not None:
            metrics = self._gather(self._timed(self.meter.take))
        observed = None
        if self.watch is not None:
            observed = together(self.exchange.all_gather(self.watch.take()))
        before = self.decision
        check = Check(number, self.layout, metrics, self.seed, observed, self._step.number)
        self.decision = self.policy.decide(before, check)
        if self.watch is not None:
            self._timed(self.watch.follow, self._compared)
        if self.decision.frozen.all() and not before.frozen.all() and self.exchange.rank == 0:
            logger.warning(
                "From step %d on every tensor is frozen by %r: the model learns nothing until some "
                "are live again",
                self._step.number + 1,
                self.policy,
            )

    @property
    def _compared(self) -> Compared | None:
        assert isinstance(self.policy, ComparesOutputs)  # it is watched for
        return self.policy.compared(self.decision, self.layout)

    def _gather(
        self, mine: Mapping[Metric, list[float | None]]
    ) -> dict[Metric, NDArray[np.float64]]:
        """Exchange the metrics of all ranks; what nobody could measure stays as it was."""
        everyone = self.exchange.all_gather(
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

    def stage_ratios(self, step: Step) -> dict[int, float]:
        """Return the frozen fraction of each stage's elements in ``step``; warm-up freezes none."""
        stages = sorted(set(self.layout.stages.tolist()))
        is_applied = step.phase is not Phase.WARMUP
        return {stage: is_applied * self.frozen_ratio(stage) for stage in stages}

    @property
    def first_live_stage(self) -> int:
        """The first stage that has a live tensor; the number of stages if everything is frozen."""
        live = self.layout.stages[~self.decision.frozen]
        return int(live.min()) if live.size else int(self.layout.stages.max()) + 1

    @property
    def frozen_layers(self) -> int:
        """How many of the first transformer blocks are frozen, the embedding with them."""
        live = self.layout.layers[~self.decision.frozen]
        return max(0, int(live.min())) if live.size else self.layout.n_layers

    # -- what it costs -----------------------------------------------------------------------------

    @property
    def n_bytes(self) -> int:
        """Memory that scoring takes on this rank."""
        return 0 if self.meter is None else self.meter.n_bytes

    def collect(self, gradient_scale: float | None) -> dict[str, Any]:
        """Return time and memory of scores, and metrics of the last decision."""
        score = self.take_ms_per_step(), self.n_bytes
        return {"score": score, "policy": dict(self.decision.metrics)}

    def close(self) -> None:
        """End the process that compares outputs."""
        if self.watch is not None:
            self.watch.close()

    def take_ms_per_step(self) -> float:
        """Return the mean time a step spent on scoring since the last call, milliseconds."""
        marks, self._marks = self._marks, []
        n_steps, self._n_steps_timed = self._n_steps_timed, 0
        if marks:
            self.clock.wait(marks[-1][1])
        total_ms = sum(self.clock.elapsed_ms(start, end) for start, end in marks)
        return total_ms / n_steps if n_steps else 0.0

    def _timed(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        start = self.clock.mark()
        answer = call(*args, **named)
        self._marks.append((start, self.clock.mark()))
        return answer

    # -- checkpoint --------------------------------------------------------------------------------

    def plain_state(self) -> dict[str, Any]:
        """Return the decision and, where they count, losses since the last check, as plain data."""
        decision = {
            "policy": repr(self.policy),
            "frozen": np.flatnonzero(self.decision.frozen).tolist(),
            "memory": dict(self.decision.memory),
            "metrics": dict(self.decision.metrics),
            "measured": {
                metric.value: [None if np.isnan(value) else value for value in row.tolist()]
                for metric, row in self._measured.items()
            },
        }
        losses = {} if self.watch is None else {"losses": self.watch.plain_losses()}
        return {"policy": decision, "front": self.settled_front, **losses}

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`plain_state` returned."""
        plain = state["policy"]
        if plain["policy"] != repr(self.policy):
            raise ValueError(
                f"the checkpoint has a decision of {plain['policy']}, this run has "
                f"{self.policy!r}; resume with the same {key('method')} and settings, or, "
                f"{begin_anew()}"
            )
        frozen = np.zeros(len(self.layout.names), dtype=np.bool_)
        frozen[plain["frozen"]] = True
        self.decision = Decision(frozen, plain["memory"], plain["metrics"])
        self._measured = {
            Metric(name): np.array(row, dtype=np.float64) for name, row in plain["measured"].items()
        }
        self.settled_front = state.get("front", self.frozen_layers)
        if self.watch is not None:
            self.watch.resume(self._compared, state.get("losses"))

    def tensor_state(self) -> dict[str, Tensor]:
        """Return the vectors the scores are made from, and weights that are compared with."""
        vectors = {} if self.meter is None else self.meter.state_dict()
        return vectors | ({} if self.watch is None else self.watch.tensor_state())

    def tensors_to_load(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return room for what :meth:`tensor_state` returned where ``names`` were saved."""
        vectors = {} if self.meter is None else self.meter.state_dict()
        return vectors | ({} if self.watch is None else self.watch.tensors_to_load(names))

    def load_tensor_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`tensor_state` returned."""
        if self.meter is not None:
            self.meter.load_state_dict(tensors)
            self._has_begun = True
        if self.watch is not None:
            self.watch.load_tensor_state(tensors)
