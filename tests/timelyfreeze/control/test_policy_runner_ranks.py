"""Checks of a policy on pretended ranks in threads: two hold four stages in a V."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.ranks import TIMEOUT_S, HandClock, Hub, ThreadExchange
from tests.timelyfreeze.helpers.stub_policy import (
    LAYOUT,
    NOTHING,
    STAGES,
    WEIGHTS,
    StubMeter,
    StubPolicy,
)
from timelyfreeze.control.build import checks_for
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.policies.policy import Check, Measurement, Metric, Source
from timelyfreeze.settings.freezing import FreezeSettings
from timelyfreeze.settings.phases import PhaseSchedule

STAGES_OF_RANK = [(0, 3), (1, 2), (0, 3), (1, 2)]  # the last two are replicas


# -- all ranks together ----------------------------------------------------------------------------


@dataclass
class Rank:
    checks: PolicyRunner
    seen: list[Check]


def run_ranks(
    choose: Callable[[Check], np.ndarray],
    n_steps: int,
    weights_of_replica: Mapping[int, Mapping[str, float]],
) -> list[Rank]:
    hub = Hub(len(STAGES_OF_RANK))

    def one(rank: int) -> Rank:
        seen: list[Check] = []

        def remember(check: Check) -> np.ndarray:
            seen.append(check)
            return choose(check)

        names = [name for stage in STAGES_OF_RANK[rank] for name, _ in STAGES[stage]]
        checks = PolicyRunner(
            StubPolicy(remember),
            LAYOUT,
            [(name, torch.empty(0)) for name in names],
            ThreadExchange(hub, rank),  # type: ignore[arg-type]
            StubMeter(names, weights_of_replica[rank // 2]),  # type: ignore[arg-type]
            HandClock(),
            seed=7,
        )
        for step in range(1, n_steps + 1):
            checks.begin_step(PhaseSchedule.unplanned(1).at(step))
            checks.end_step(PhaseSchedule.unplanned(1).at(step))
        return Rank(checks, seen)

    with ThreadPoolExecutor(hub.size) as pool:
        futures = [pool.submit(one, rank) for rank in range(hub.size)]
        return [future.result(timeout=TIMEOUT_S) for future in futures]


def test_every_rank_sees_the_tensors_of_all_and_decides_alike() -> None:
    def choose(check: Check) -> np.ndarray:
        return check.metrics[Metric.ABS_SUM] < 9.0 if check.metrics else NOTHING

    ranks = run_ranks(choose, 5, {0: WEIGHTS, 1: WEIGHTS})
    wanted = 2.0 * np.array([WEIGHTS[name] for name in LAYOUT.names])
    for rank in ranks:
        assert [check.number for check in rank.seen] == [0, 1, 2]
        for check in rank.seen[1:]:
            assert np.array_equal(check.metrics[Metric.ABS_SUM], wanted)
        # Weights 1 to 4 are those of stage 0 and of the first tensor of stage 1.
        assert rank.checks.decision.frozen.tolist() == [True] * 4 + [False] * 6


def test_replicas_may_differ_in_the_last_bit_and_still_decide_alike() -> None:
    """A rule that only looks at which of two equal numbers came out larger."""
    other = {name: np.nextafter(weight, 100.0) for name, weight in WEIGHTS.items()}

    def choose(check: Check) -> np.ndarray:
        if not check.metrics:
            return NOTHING
        wanted = 2.0 * np.array([WEIGHTS[name] for name in LAYOUT.names])
        return check.metrics[Metric.ABS_SUM] > wanted

    for weights in ({0: WEIGHTS, 1: other}, {0: other, 1: WEIGHTS}):
        ranks = run_ranks(choose, 3, weights)
        decisions = [rank.checks.decision.frozen.tolist() for rank in ranks]
        assert decisions == [decisions[0]] * 4
        assert len(set(decisions[0])) == 1, "all numbers are one replica's"
        metrics = [rank.seen[1].metrics[Metric.SQUARE_SUM].tolist() for rank in ranks]
        assert metrics == [metrics[0]] * 4


# -- set up for the stages of a rank ---------------------------------------------------------------


class ModelStage:
    """The part of a stage that policies look at, with real parameters."""

    def __init__(self, stage_index: int) -> None:
        self.stage_index = stage_index
        self._named = [
            (name, nn.Parameter(torch.zeros(size))) for name, size in STAGES[stage_index]
        ]
        self.parameter_names = tuple(name for name, _ in self._named)
        self.parameter_sizes = np.array([p.numel() for _, p in self._named])

    def named_stage_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self._named)


def set_up(
    policy: StubPolicy, **settings: Any
) -> tuple[list[list[ModelStage]], list[PolicyRunner], Callable[[Callable[[int], Any]], list[Any]]]:
    """Stages and checks of the two ranks of a pipeline, and how to do something on both."""
    hub = Hub(2)
    stages = [[ModelStage(stage) for stage in STAGES_OF_RANK[rank]] for rank in range(2)]

    def on_both(what: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(what, rank) for rank in range(2)]
            return [future.result(timeout=TIMEOUT_S) for future in futures]

    checks = on_both(
        lambda rank: checks_for(
            stages[rank],  # type: ignore[arg-type]
            policy,
            FreezeSettings(last_warmup_step=1, seed=3, **settings).unplanned,
            ThreadExchange(hub, rank),  # type: ignore[arg-type]
            HandClock(),
        )
    )
    return stages, checks, on_both


def test_weights_that_move_are_seen_by_every_rank() -> None:
    """Stage s moves by s + 1 in each step, so tensor i moves by size * (s + 1) * 2 in two."""
    seen: list[Check] = []

    def choose(check: Check) -> np.ndarray:
        seen.append(check)
        return NOTHING

    measurement = Measurement(Source.UPDATES, (Metric.ABS_SUM,))
    stages, checks, on_both = set_up(StubPolicy(choose, 2, measurement))

    def run(rank: int) -> None:
        n_tensors = sum(len(STAGES[stage.stage_index]) for stage in stages[rank])
        checks[rank].frequency = lambda: np.ones(n_tensors)
        for step in range(1, 4):
            checks[rank].begin_step(PhaseSchedule.unplanned(1).at(step))
            for stage in stages[rank]:
                for _, parameter in stage.named_stage_parameters():
                    parameter.data += stage.stage_index + 1
            checks[rank].end_step(PhaseSchedule.unplanned(1).at(step))

    on_both(run)
    assert [check.seed for check in seen] == [3] * 4
    wanted = [2.0 * size * (stage + 1) for stage, tensors in STAGES.items() for _, size in tensors]
    for check in seen[2:]:
        assert check.layout.names == LAYOUT.names
        assert check.layout.stages.tolist() == LAYOUT.stages.tolist()
        assert check.metrics[Metric.ABS_SUM].tolist() == wanted


@pytest.mark.parametrize(
    ("score_dtype", "n_bytes"), [("float32", [4 * 240, 4 * 80]), ("bfloat16", [2 * 240, 2 * 80])]
)
@pytest.mark.parametrize("score_memory", ["device", "host"])
def test_memory_is_that_of_the_own_tensors(
    score_memory: str, score_dtype: str, n_bytes: list[int]
) -> None:
    measurement = Measurement(Source.UPDATES, (Metric.ABS_SUM,))
    policy = StubPolicy(lambda check: NOTHING, 2, measurement)
    _, checks, _ = set_up(policy, score_memory=score_memory, score_dtype=score_dtype)
    assert [each.n_bytes for each in checks] == n_bytes
    kept = [t for each in checks for t in each.tensor_state().values()]
    assert {t.dtype for t in kept} == {getattr(torch, score_dtype)}


def test_a_policy_without_a_measurement_keeps_no_vectors() -> None:
    _, checks, _ = set_up(StubPolicy(lambda check: NOTHING, 2, measurement=None))
    assert [each.n_bytes for each in checks] == [0, 0]
    assert [each.tensor_state() for each in checks] == [{}, {}]
