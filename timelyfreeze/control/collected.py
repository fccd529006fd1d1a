"""What all ranks measured between two logged steps, put together."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from timelyfreeze.control.plans.active_plan import ActivePlan
from timelyfreeze.control.plans.replanning import drifts, forward_drift
from timelyfreeze.front.caching import CacheUse, use_of_all
from timelyfreeze.records.convergence import PassedEnergy
from timelyfreeze.runtime import ActionRecorder, Masks, ObservedBatch, StepPart
from timelyfreeze.runtime.meters import RankUpdates, step_ratios
from timelyfreeze.schedule import Action
from timelyfreeze.settings import Phase, Step
from timelyfreeze.timing import (
    BatchRecord,
    RankBatches,
    batch_times,
    misreading,
    rank_batches,
    slowest,
)

logger = logging.getLogger(__name__)

# What masks really froze of each backward, as a fraction of its elements, by stage and microbatch.
Applied = Mapping[int, Mapping[int, float]]
# Microbatches whose input gradient nobody needs, by stage.
Cut = Mapping[int, Collection[int]]
_UNDER_A_PLAN = {Phase.STABLE, Phase.CONTROL}


@dataclass(frozen=True)
class BatchSummary:
    """What a rank has measured since it was last told."""

    batches: RankBatches  # warm batches, as the other ranks want them
    # median time of each action over batches under a plan, milliseconds; empty without stable ones
    under_plan_ms: Mapping[Action, float]
    # mean frozen fraction of each stage's backwards in the current step
    applied_stage_ratios: dict[int, float]
    mask_hashes: Mapping[int, int]  # of all masks since then, by stage; equal masks have equal ones


@dataclass(frozen=True)
class RankMetrics:
    """What one rank tells the others when metrics are collected."""

    log: BatchSummary  # its batches since the last collection
    updates: RankUpdates  # what is left of the updates of its tensors
    # time a step spent on a policy's scores, milliseconds, and their bytes; None without a policy
    score: tuple[float, int] | None = None
    cache: CacheUse | None = None  # what it had of the cache of a frozen front; None without one
    policy: Mapping[str, float] = field(default_factory=dict)  # metrics of the last decision


@dataclass(frozen=True)
class CollectedMetrics:
    """What all ranks together measured since the last collection."""

    batch_ms: dict[Phase, tuple[float, ...]]  # time of each measured batch, by phase, oldest first
    # mean frozen fraction of elements of each stage's backwards in the current step
    applied_stage_ratios: dict[int, float]
    # frozen fraction of all elements in all backwards of the steps that have ended (Sec. 4.2)
    average_freeze_ratio: float
    # time a step spent on a policy's scores since the last collection, on the slowest rank; None
    # without a policy
    score_ms_per_step: float | None = None
    # memory that scores take, on the rank where they take most; None likewise
    score_bytes: int | None = None
    # metrics of the policy's last decision
    policy: Mapping[str, float] = field(default_factory=dict)
    # how many times as long as in the bounds forwards take under the plan, which does not shorten
    # them: above 1 the machine has become slower, or rows longer. None while there is no plan, and
    # without a stable batch
    drift: float | None = None
    # frozen fraction of all elements of each step since the last collection, the current one
    # included, mean over its backwards
    step_ratios: Mapping[int, float] = field(default_factory=dict)
    # gradient energy of the model, and how much of it the masks of the current phase have let
    # through since the last collection; None where it is not measured
    energy: PassedEnergy | None = None
    # what the run had of the cache of a frozen front; None without one
    cache: CacheUse | None = None


def collected(ranks: Sequence[RankMetrics], active_plan: ActivePlan) -> CollectedMetrics:
    """Put together what the ranks, one entry per process, tell; see :func:`batch_times`."""
    _check_same_masks(ranks)
    batches = [rank.log.batches for rank in ranks]
    under_plan_ms = [rank.log.under_plan_ms for rank in ranks]
    dag, plan, bounds, drift = active_plan.dag, active_plan.plan, active_plan.bounds, None
    if all(under_plan_ms) and plan is not None and bounds is not None:
        drift = forward_drift(drifts(dag, bounds, plan.durations_ms, slowest(under_plan_ms)))
    applied: dict[int, list[float]] = {}
    for rank in ranks:
        for stage, fraction in rank.log.applied_stage_ratios.items():
            applied.setdefault(stage, []).append(fraction)
    frozen = sum(rank.updates.total[0] for rank in ranks)
    elements = sum(rank.updates.total[1] for rank in ranks)
    scores = [rank.score for rank in ranks if rank.score is not None]
    uses = [rank.cache for rank in ranks if rank.cache is not None]
    energies = [rank.updates.energy for rank in ranks if rank.updates.energy is not None]
    return CollectedMetrics(
        batch_ms=batch_times(dag, batches, None if bounds is None else bounds.delays_ms(dag)),
        applied_stage_ratios={s: sum(v) / len(v) for s, v in sorted(applied.items())},
        average_freeze_ratio=frozen / elements if elements else 0.0,
        score_ms_per_step=max((ms for ms, _ in scores), default=None),
        score_bytes=max((n_bytes for _, n_bytes in scores), default=None),
        policy=ranks[0].policy,
        drift=drift,
        step_ratios=step_ratios([rank.updates.steps for rank in ranks]),
        energy=sum(energies[1:], energies[0]) if energies else None,
        cache=use_of_all(uses) if uses else None,
    )


def _check_same_masks(ranks: Sequence[RankMetrics]) -> None:
    """See that all processes that hold a stage have frozen the same.

    Masks are a pure function of what all of them know. Should they ever differ, gradients of
    different tensors would be reduced with each other, or a reduction would wait for ever.
    """
    first: dict[int, tuple[int, int]] = {}
    for number, rank in enumerate(ranks):
        for stage, mask_hash in rank.log.mask_hashes.items():
            other, expected = first.setdefault(stage, (number, mask_hash))
            if mask_hash != expected:
                raise RuntimeError(
                    f"ranks {other} and {number} hold stage {stage} and have frozen different "
                    "tensors of it since metrics were logged last; their weights are no longer "
                    "the same. Resume from the last checkpoint, and report this: it is a defect"
                )


class BatchLog(StepPart):
    """Keeps batches until their times are read, and their times until they are told."""

    name = "log"
    on_batch: Callable[[ObservedBatch], None] | None = None  # told of each whose times are read

    def __init__(self, recorder: ActionRecorder, rank: int, discard_batches: int) -> None:
        self._recorder, self._rank, self._discard_batches = recorder, rank, discard_batches
        self._n_alike = 0  # batches since the phase or the plan has changed
        self._unread: list[tuple[ObservedBatch, Applied, Cut]] = []
        self._untold: list[tuple[Phase, BatchRecord]] = []
        self._step_applied: dict[int, list[float]] = {}
        self._has_misread = False
        self._mask_hashes: dict[int, int] = {}

    def begin_step(self, step: Step) -> None:
        """Enter an optimizer step."""
        self._step_applied = {}
        if step.is_first_of_phase:
            self._n_alike = 0

    @property
    def is_cold(self) -> bool:
        """Whether the next batch is one of the first of its phase or plan."""
        return self._n_alike < self._discard_batches

    def add(self, batch: ObservedBatch, applied: Applied, cut: Cut) -> None:
        """Take note of a batch that the recorder has just finished."""
        self._unread.append((batch, applied, cut))
        self._n_alike += 1
        for stage, fractions in applied.items():
            self._step_applied.setdefault(stage, []).extend(fractions.values())

    def end_batch(self, number: int, masks: Masks) -> None:
        """Take note of what a batch has frozen."""
        for stage, of_stage in masks.items():
            mask_hash = self._mask_hashes.get(stage, 0)
            for microbatch, mask in sorted(of_stage.items()):
                mask_hash = crc32(mask.tobytes(), crc32(b"%d" % microbatch, mask_hash))
            self._mask_hashes[stage] = mask_hash

    def read(self, observed: ObservedBatch) -> None:
        """Tell a batch."""
        if self.on_batch is not None:
            self.on_batch(observed)

    def drain(self) -> list[ObservedBatch]:
        """Wait for the device and return the batches since the last call, oldest first."""
        found = []
        for (batch, applied, cut), record in zip(self._unread, self._recorder.drain(), strict=True):
            freezable = [action for action in record.durations_ms if action.kind.freezable]
            fractions = {a: applied[a.stage][a.microbatch] for a in freezable}
            # A first stage has no input gradient to leave out.
            was_cut = {a for a in freezable if a.stage and a.microbatch in cut[a.stage]}
            found.append(replace(batch, record=record, fractions=fractions, cut=was_cut))
            self._tell_misreading(found[-1])
            if not batch.is_cold:
                self._untold.append((batch.phase, record))
        self._unread = []
        return found

    def collect(self, gradient_scale: float | None) -> dict[str, BatchSummary]:
        """Return what has been drained since the last call."""
        untold, self._untold = self._untold, []
        mask_hashes, self._mask_hashes = self._mask_hashes, {}
        batches = [(phase, each.durations_ms, each.span_ms) for phase, each in untold]
        is_stable = any(phase is Phase.STABLE for phase, _ in untold)
        # Forwards of control steps are as long.
        under_plan = [batch for batch in batches if is_stable and batch[0] in _UNDER_A_PLAN]
        summary = BatchSummary(
            rank_batches(batches),
            rank_batches(under_plan).durations_ms,
            {stage: sum(s) / len(s) for stage, s in self._step_applied.items() if s},
            mask_hashes,
        )
        return {"log": summary}

    def begin_plan(self) -> None:
        """Leave out what ran under another plan, and the first batches under this one."""
        self._n_alike = 0
        self._untold = [entry for entry in self._untold if entry[0] not in _UNDER_A_PLAN]

    def _tell_misreading(self, batch: ObservedBatch) -> None:
        """Warn once of a time that cannot be; where a plan fails by it, that is told anyway."""
        told = misreading(batch.record.durations_ms, batch.record.span_ms)
        if told is None or batch.pattern is not None or self._has_misread:
            return
        self._has_misread = True
        logger.warning(
            "Rank %d: a clock misread in step %d: %s; batch times are left out wherever such a "
            "time would be part of them, and no plan is made by them",
            self._rank,
            batch.step,
            told,
        )
