"""A controller of all ranks beside controllers of one rank each, and checkpoints between them."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.timelyfreeze.helpers.pipelines import hand_order, simulate
from tests.timelyfreeze.helpers.ranks import (
    PHASES,
    HandClock,
    Hub,
    Ranks,
    StubStage,
    ThreadExchange,
    linear_ms,
    settings_of,
    stub_layout,
    without_stable_times,
)
from tests.timelyfreeze.helpers.stub_policy import StubMeter, StubPolicy
from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.control.controller import FreezeController
from timelyfreeze.control.emulated import (
    EmulatedRecorder,
    EmulatedState,
    merge_ranks,
    merge_states,
    split_state,
)
from timelyfreeze.control.plans.planner import Planner
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.policies.policy import FreezePolicy
from timelyfreeze.schedule.order import Action, ScheduleOrder, one_f_one_b_order, parse_action
from timelyfreeze.settings.freezing import SKIP_INPUT_GRADS
from timelyfreeze.settings.phases import Phase, PhaseSchedule

pytestmark = pytest.mark.slow

ORDERS = {
    "1F1B": one_f_one_b_order(2, 4),
    "1F1B of four": one_f_one_b_order(4, 4),
    "zero_bubble": hand_order("zero_bubble"),
    "v_shape": hand_order("v_shape"),
    "interleaved": hand_order("interleaved"),
}
LAST_STEP = 13


class EmulatedRanks:
    """All ranks of ``order`` in one controller, run action by action on a clock moved by hand."""

    def __init__(
        self,
        order: ScheduleOrder,
        *,
        duration_ms: Callable[[Action, float], float] = linear_ms,
        policy: FreezePolicy | None = None,
        **settings: Any,
    ) -> None:
        self.order, self.duration_ms = order, duration_ms
        self.stages = {s: StubStage(s) for s in range(order.n_stages)}
        self.clock = HandClock()
        self.recorder = EmulatedRecorder(self.clock, order)
        self.settings = settings_of(**settings)
        exchange = ThreadExchange(Hub(1), 0)
        self.checks = None
        if policy is not None:
            layout = stub_layout(order.n_stages)
            weights = {name: 1.0 + i for i, name in enumerate(layout.names)}
            self.checks = PolicyRunner(
                policy,
                layout,
                [(name, torch.empty(0)) for name in layout.names],
                exchange,  # type: ignore[arg-type]
                StubMeter(layout.names, weights),  # type: ignore[arg-type]
                self.clock,
                self.settings.seed,
            )
        self.controller = FreezeController(
            list(self.stages.values()),  # type: ignore[arg-type]
            self.settings,
            self.recorder,
            exchange,  # type: ignore[arg-type]
            Planner(order, self.settings, self.settings.phases, exchange),  # type: ignore[arg-type]
            self.checks,
            state=EmulatedState,
        )

    def run(self, first: int, last: int, batches_per_step: int = 3) -> None:
        for step in range(first, last + 1):
            self.controller.begin_step(step)
            for _ in range(batches_per_step):
                with self.controller.one_batch():
                    for action in merge_ranks(self.order):
                        stage = self.stages[action.stage]
                        fraction = stage.fraction(action.microbatch)
                        with self.recorder.measure(action):
                            if not stage.is_idle(action):
                                self.clock.now_ms += self.duration_ms(action, fraction)
                        if action.kind.freezable:
                            stage.applied_ratios[action.microbatch] = fraction
            self.controller.end_step()

    @property
    def controllers(self) -> list[FreezeController]:
        return [self.controller]

    def collect(self) -> list[CollectedMetrics]:
        return [self.controller.collect()]

    def load(self, state: dict[str, Any]) -> None:
        self.controller.load_state_dict(state)

    def saved(self) -> dict[str, Any]:
        state = self.controller.state_dict()
        tensors = {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
        return {
            **json.loads(json.dumps({k: state[k] for k in state if k not in tensors})),
            **tensors,
        }


def masks_of(ranks: Ranks | EmulatedRanks, stage: int) -> list[dict[int, list[bool]]]:
    """What each pass of a stage was given to freeze."""
    if isinstance(ranks, EmulatedRanks):
        return ranks.stages[stage].given
    holder = ranks.executed.stage_to_rank[stage]
    return ranks.stages[holder][stage].given


def ratios(controller: Any) -> dict[str, float]:
    return dict(zip(map(str, controller.plan.actions), controller.plan.ratios, strict=True))


PLACES = {"warm-up": 1, "upper bound": 3, "lower bound": 5, "solved": 6, "ramp": 8, "stable": 11}


@dataclass(frozen=True)
class Whole:
    """A run at one go, and what a checkpoint held at each of ``PLACES``."""

    ranks: Any
    metrics: CollectedMetrics
    states: dict[str, dict[str, Any]]

    def saved(self, place: str) -> dict[str, Any]:
        return copy.deepcopy(self.states[place])


@cache
def whole_run(kind: type, name: str, **settings: Any) -> Whole:
    ranks, states, last = kind(ORDERS[name], **settings), {}, 0
    for place, stop in PLACES.items():
        ranks.run(last + 1, stop)
        states[place], last = ranks.saved(), stop
    ranks.run(last + 1, LAST_STEP)
    metrics = ranks.controller.collect() if kind is EmulatedRanks else ranks.collect()[0]
    return Whole(ranks, metrics, states)


# -- without checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
def test_it_plans_and_freezes_as_ranks_with_a_process_each(name: str) -> None:
    order = ORDERS[name]
    alone, emulated = whole_run(Ranks, name).ranks, whole_run(EmulatedRanks, name).ranks
    controller = emulated.controller
    assert controller.plan is not None
    assert sum(controller.plan.ratios) > 0
    assert ratios(controller) == ratios(alone.controllers[0])
    assert controller.active_plan.order == order
    bounds, wanted = (c.active_plan.bounds for c in (controller, alone.controllers[0]))
    assert np.array_equal(bounds.max_ms, wanted.max_ms)
    assert np.array_equal(bounds.min_ms, wanted.min_ms)
    for stage in range(order.n_stages):
        assert masks_of(emulated, stage) == masks_of(alone, stage)


@pytest.mark.parametrize("name", ORDERS)
def test_the_metrics_are_those_of_ranks_with_a_process_each(name: str) -> None:
    order = ORDERS[name]
    alone, emulated = Ranks(order), EmulatedRanks(order)
    alone.run(1, 4)
    emulated.run(1, 4)
    want, got = alone.collect()[0], emulated.controller.collect()
    assert got.average_freeze_ratio == pytest.approx(want.average_freeze_ratio)
    assert got.applied_stage_ratios == want.applied_stage_ratios
    (unfrozen_ms,) = set(got.batch_ms[Phase.UPPER_BOUND])
    simulated = simulate(order, lambda action: linear_ms(action, 0.0))
    assert unfrozen_ms == max(end for _, end in simulated.values())


@pytest.mark.parametrize("skip_input_grads", SKIP_INPUT_GRADS)
@pytest.mark.parametrize("max_freeze_ratio", [0.6, 1.0])
def test_a_batch_takes_what_the_plan_says(max_freeze_ratio: float, skip_input_grads: str) -> None:
    emulated = EmulatedRanks(
        ORDERS["1F1B of four"], max_freeze_ratio=max_freeze_ratio, skip_input_grads=skip_input_grads
    )
    emulated.run(1, LAST_STEP)
    controller = emulated.controller
    metrics = controller.collect()
    assert controller.plan is not None
    # A ratio is hit to the nearest of 12 tensors. One backward that is idle makes 6%.
    assert metrics.batch_ms[Phase.STABLE][-1] == pytest.approx(controller.plan.batch_ms, rel=0.01)
    assert metrics.batch_ms[Phase.UPPER_BOUND][-1] == controller.plan.unfrozen_batch_ms
    # While it is measured, every input gradient is computed.
    lower_ms, all_frozen_ms = (
        metrics.batch_ms[Phase.LOWER_BOUND][-1],
        controller.plan.frozen_batch_ms,
    )
    assert lower_ms == all_frozen_ms if skip_input_grads == "off" else lower_ms > all_frozen_ms


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["1F1B", "v_shape"])
@pytest.mark.parametrize(("before", "after"), [(Ranks, EmulatedRanks), (EmulatedRanks, Ranks)])
def test_a_run_goes_on_emulated_or_with_a_process_for_each_rank(
    before: Any, after: Any, name: str, place: str
) -> None:
    order, stop = ORDERS[name], PLACES[place]
    whole, resumed = whole_run(before, name), after(order)
    resumed.load(whole.saved(place))
    resumed.run(stop + 1, LAST_STEP)
    got, want = resumed.controllers[0], whole.ranks.controllers[0]
    assert ratios(got) == pytest.approx(ratios(want))
    for stage in range(order.n_stages):
        assert masks_of(resumed, stage) == masks_of(whole.ranks, stage)[3 * stop :]
    average = resumed.collect()[0].average_freeze_ratio
    assert average == pytest.approx(whole.metrics.average_freeze_ratio)


@pytest.mark.parametrize("place", PLACES)
def test_mixed_monitoring_goes_both_ways(place: str) -> None:
    order, stop = ORDERS["v_shape"], PLACES[place]
    phases = replace(PHASES, monitoring="mixed")
    alone, emulated = (whole_run(kind, "v_shape", phases=phases) for kind in (Ranks, EmulatedRanks))
    there, back = Ranks(order, phases=phases), EmulatedRanks(order, phases=phases)
    there.load(emulated.saved(place))
    back.controller.load_state_dict(alone.saved(place))
    for ranks in (there, back):
        ranks.run(stop + 1, LAST_STEP)
    want = ratios(alone.ranks.controllers[0])
    assert sum(want.values()) > 0
    for controller in (emulated.ranks.controller, there.controllers[0], back.controller):
        assert ratios(controller) == pytest.approx(want)
    for stage in range(order.n_stages):
        tail = masks_of(alone.ranks, stage)[3 * stop :]
        assert masks_of(emulated.ranks, stage)[3 * stop :] == tail
        assert masks_of(there, stage) == masks_of(back, stage) == tail


def test_what_only_one_of_the_ranks_knows_is_kept() -> None:
    """Each times the links to ranks of a higher number."""
    links = [[[0, 1, 2.0], [1, 0, 2.0]], [[1, 2, 3.0], [2, 1, 3.0]], []]
    parts = [
        {"applied": [0, 0], "planner": {"samples": {}, "p2p_latency_ms": mine}} for mine in links
    ]
    merged = merge_states(parts, one_f_one_b_order(3, 3))
    assert merged["planner"]["p2p_latency_ms"] == [*links[0], *links[1]]


@pytest.mark.parametrize("place", PLACES)
def test_an_emulated_run_resumes_as_if_it_had_not_stopped(place: str) -> None:
    order, stop = ORDERS["interleaved"], PLACES[place]
    whole, resumed = whole_run(EmulatedRanks, "interleaved"), EmulatedRanks(order)
    resumed.controller.load_state_dict(whole.saved(place))
    assert resumed.saved() == whole.saved(place)
    resumed.run(stop + 1, LAST_STEP)
    assert without_stable_times(resumed.saved()) == without_stable_times(whole.ranks.saved())
    assert ratios(resumed.controller) == ratios(whole.ranks.controller)


def test_every_rank_gets_the_times_of_its_own_stages_and_its_own_span() -> None:
    order = ORDERS["v_shape"]
    emulated = EmulatedRanks(order)
    emulated.run(1, 4)
    state = emulated.saved()
    simulated = simulate(order, lambda action: linear_ms(action, 0.0))
    assert {key for key in state if key.startswith("rank_")} == {"rank_0", "rank_1"}
    for rank, row in enumerate(order.ranks):
        samples = json.loads(state[f"rank_{rank}"])["planner"]["samples"]["upper_bound"]
        assert len(samples["warm"]) == len(samples["spans_ms"]) == 2 * 3 - 1
        assert len(samples["cold"]) == 1
        for times in [*samples["warm"], *samples["cold"]]:
            assert list(map(parse_action, times)) == list(row), "in the order in which they ran"
        span_ms = max(simulated[a][1] for a in row) - min(simulated[a][0] for a in row)
        assert samples["spans_ms"] == pytest.approx([span_ms] * 5)


def freeze_every_other(check: Any) -> np.ndarray:
    return np.arange(len(check.layout.names)) % 2 == check.number % 2


@pytest.mark.parametrize("phases", ["planned", "alone"])
def test_a_policys_decision_and_vectors_go_both_ways(phases: str) -> None:
    order = ORDERS["1F1B"]
    settings: dict[str, Any] = {}
    if phases == "alone":
        settings["phases"] = PhaseSchedule.unplanned(2)
    policy = StubPolicy(freeze_every_other, check_interval=3)
    alone = Ranks(order, policy=policy, **settings)
    emulated = EmulatedRanks(order, policy=policy, **settings)
    alone.run(1, 7)
    emulated.run(1, 7)
    theirs, ours = alone.saved(), emulated.saved()
    assert theirs.keys() == ours.keys()
    back = EmulatedRanks(order, policy=policy, **settings)
    back.controller.load_state_dict(theirs)
    there = Ranks(order, policy=policy, **settings)
    there.load(ours)
    for ranks in (alone, emulated, back, there):
        ranks.run(8, LAST_STEP)
    for stage in range(order.n_stages):
        tail = masks_of(alone, stage)[3 * 7 :]
        assert any(tail)
        assert masks_of(emulated, stage)[3 * 7 :] == tail
        assert masks_of(back, stage) == tail
        assert masks_of(there, stage) == tail


def test_a_checkpoint_of_fewer_ranks_is_refused() -> None:
    two, four = EmulatedRanks(ORDERS["1F1B"]), EmulatedRanks(ORDERS["1F1B of four"])
    two.run(1, 3)
    with pytest.raises(ValueError, match=r"by a pipeline of 2 ranks, .*a pipeline of size 4"):
        four.controller.load_state_dict(two.saved())


def test_ranks_that_do_not_fit_together_are_refused() -> None:
    order = ORDERS["1F1B"]
    emulated = EmulatedRanks(order)
    emulated.run(1, 4)
    state = emulated.saved()
    parts = [json.loads(state[f"rank_{rank}"]) for rank in range(2)]
    parts[1]["planner"]["samples"]["upper_bound"]["warm"].pop()
    with pytest.raises(ValueError, match=r"have measured \[5, 4\] warm batches"):
        merge_states(parts, order)


def test_splitting_leaves_its_argument_alone_and_merging_undoes_it() -> None:
    order = ORDERS["interleaved"]
    emulated = EmulatedRanks(order)
    emulated.run(1, 5)
    state = emulated.saved()
    whole = merge_states([json.loads(state[f"rank_{r}"]) for r in range(2)], order)
    before = json.dumps(whole)
    parts = split_state(whole, order)
    assert json.dumps(whole) == before
    assert merge_states(parts, order) == whole
