"""Egeria's rule: when it begins, what it freezes and when it lets go, followed by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.timelyfreeze.helpers.stub_policy import LAYOUT
from tests.timelyfreeze.helpers.toy_model import only_error
from timelyfreeze.policies import Check, Compared, ComparesOutputs, Decision, Difference, Observed
from timelyfreeze.policies.egeria import Egeria
from timelyfreeze.policies.layout import build_layout
from timelyfreeze.policies.policy import Evaluation, ReferenceSettings, together
from timelyfreeze.settings import arguments_named

# Four blocks of one size, hence four modules.
GUIDED = [Observed(2.0, 1.0), Observed(2.0, 1.0)]  # two checks that end bootstrapping


def start(policy: Egeria) -> Decision:
    return policy.start(Check(0, LAYOUT, {}, 7))


def run(policy: Egeria, seen: Sequence[Observed], before: Decision | None = None) -> Decision:
    decision = before or start(policy)
    for number, observed in enumerate(seen, start=1):
        decision = policy.decide(decision, Check(number, LAYOUT, {}, 7, observed))
    return decision


def found(*values: float, layer: int = 0, rate: float = 1.0, dropped: int = 0) -> Observed:
    """What a check sees: plasticities of one module."""
    differences = tuple(Difference(10 + i, layer, value) for i, value in enumerate(values))
    return Observed(1.0, rate, differences, dropped)


def frozen_layers(decision: Decision) -> int:
    n = int(decision.metrics["frozen_layers"])
    assert decision.frozen.tolist() == LAYOUT.prefix(n).tolist()
    return n


def compared(policy: Egeria, decision: Decision) -> tuple[int, int] | None:
    return (wanted := policy.compared(decision, LAYOUT)) and (wanted.first, wanted.end)


# -- bootstrapping ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([2.0], False),
        ([2.0, 1.81], True),
        ([2.0, 1.79], False),
        ([2.0, 2.21], False),
        ([2.0, 2.19], True),
        ([4.0, 2.0, 1.0, 0.95], True),
        ([None, 2.0], False),
        ([2.0, None, 2.0], False),
    ],
)
def test_nothing_is_compared_until_the_loss_stays_within_a_tenth(
    losses: list[float | None], ends: bool
) -> None:
    policy = Egeria()
    decision = run(policy, [Observed(loss, 1.0) for loss in losses])
    assert compared(policy, decision) == ((0, 1) if ends else None)
    assert frozen_layers(decision) == 0


def test_how_little_a_loss_must_change_is_a_setting() -> None:
    policy = Egeria(bootstrap_change=0.6)
    assert compared(policy, run(policy, [Observed(2.0, 1.0), Observed(1.0, 1.0)])) == (0, 1)


def test_what_comes_while_bootstrapping_is_not_counted() -> None:
    policy = Egeria(stale=1)
    assert frozen_layers(run(policy, [found(1.0), found(1.0)])) == 0


# -- freezing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [1, 2, 5])
def test_a_module_standing_still_is_frozen_as_many_evaluations_after_the_first(stale: int) -> None:
    policy = Egeria(stale=stale)
    decision = run(policy, [*GUIDED, found(0.25)])
    for n in range(1, stale + 1):
        assert frozen_layers(decision) == 0
        assert decision.metrics["stale_evaluations"] == n - 1
        decision = run(policy, [found(0.25)], decision)
    assert frozen_layers(decision) == 1
    assert compared(policy, decision) == (1, 2)
    assert "plasticity" not in decision.metrics, "the next module has a history of its own"


def test_a_module_that_moves_is_not_frozen() -> None:
    policy = Egeria(stale=2, window=2)
    decision = run(policy, [*GUIDED, *(found(float(n)) for n in range(20))])
    assert frozen_layers(decision) == 0
    assert decision.metrics["plasticity"] == 19.0
    assert decision.metrics["smoothed_plasticity"] == 18.5
    assert decision.metrics["plasticity_slope"] == 1.0


def test_results_that_come_late_count_one_by_one() -> None:
    policy = Egeria(stale=3)
    decision = run(policy, [*GUIDED, found(), found(1.0, 1.0, 1.0)])
    assert frozen_layers(decision) == 0
    assert frozen_layers(run(policy, [found(1.0)], decision)) == 1


def test_of_what_arrives_after_a_module_was_frozen_nothing_counts_for_the_next() -> None:
    policy = Egeria(stale=2)
    decision = run(policy, [*GUIDED, found(1.0, 1.0, 1.0, 1.0), found(1.0, 1.0)])
    assert frozen_layers(decision) == 1
    assert decision.metrics["stale_evaluations"] == 0


def test_the_last_module_is_never_frozen_nor_compared() -> None:
    policy = Egeria(stale=1)
    decision = run(policy, [*GUIDED, *(found(1.0, 1.0, layer=layer) for layer in range(4))])
    assert frozen_layers(decision) == 3
    assert compared(policy, decision) is None
    assert frozen_layers(run(policy, [found(1.0, layer=3)] * 5, decision)) == 3


def test_a_module_of_several_blocks_is_frozen_whole() -> None:
    policy = Egeria(stale=1, modules=[r"layers\.0\.", r"layers\.[1]\.", r"layers\.[2]\.", r"\.3\."])
    assert frozen_layers(run(policy, [*GUIDED, found(1.0, 1.0)])) == 1
    layout = build_layout({0: [("e", 1), *((f"layers.{i}.w", 4) for i in range(4)), ("h", 1)]})
    policy = Egeria(stale=1, modules=[r"layers\.[01]\.", r"layers\.[23]\."])
    decision = policy.start(Check(0, layout, {}, 7))
    for number, observed in enumerate([*GUIDED, found(1.0, 1.0)], start=1):
        decision = policy.decide(decision, Check(number, layout, {}, 7, observed))
    assert decision.frozen.tolist() == layout.prefix(2).tolist()


def test_numbers_that_are_none_count_as_dropped() -> None:
    policy = Egeria(stale=1)
    decision = run(policy, [*GUIDED, found(float("nan"), dropped=2), found(float("inf"))])
    assert frozen_layers(decision) == 0
    assert decision.metrics["dropped_evaluations"] == 4


def test_a_decision_tells_what_it_took_into_account() -> None:
    """That of the module it froze too, whose history is over; nothing that came too late."""
    policy = Egeria(stale=2, window=2)
    decision = run(policy, [*GUIDED, found(1.0, 3.0), found(5.0)])
    assert decision.evaluations == (Evaluation(10, 0, 5.0, 4.0),)
    decision = run(policy, [*GUIDED, found(1.0, 1.0, 1.0, 1.0)])
    assert decision.evaluations == tuple(Evaluation(10 + n, 0, 1.0, 1.0) for n in range(3))
    assert run(policy, [found()], decision).evaluations == ()


def test_metrics_tell_whether_it_is_bootstrapping() -> None:
    decisions = [start(Egeria()), run(Egeria(), GUIDED[:1]), run(Egeria(), GUIDED)]
    assert [decision.metrics["bootstrapping"] for decision in decisions] == [1.0, 1.0, 0.0]


# -- snapshots -------------------------------------------------------------------------------------


def test_a_new_copy_is_wanted_after_as_many_evaluations_as_the_window_has() -> None:
    policy = Egeria(window=3, stale=100)
    decision = run(policy, GUIDED)
    copies = []
    for n in range(7):
        wanted = policy.compared(decision, LAYOUT)
        assert wanted is not None
        copies.append(wanted.copy)
        decision = run(policy, [found(float(n))], decision)
    assert copies == [1, 1, 1, 2, 2, 2, 3]


def test_checks_without_a_result_do_not_age_a_copy() -> None:
    policy = Egeria(window=2)
    decision = run(policy, [*GUIDED, *[found(dropped=1)] * 9])
    assert policy.compared(decision, LAYOUT) == Compared(0, 1, 1)
    assert decision.metrics["dropped_evaluations"] == 9


def test_the_next_module_has_a_copy_of_its_own() -> None:
    policy = Egeria(stale=1)
    assert policy.compared(run(policy, [*GUIDED, found(1.0, 1.0)]), LAYOUT) == Compared(1, 2, 2)


# -- unfreezing ------------------------------------------------------------------------------------


def test_all_is_live_again_at_a_tenth_of_the_learning_rate_of_the_first_freeze() -> None:
    policy = Egeria(stale=1)
    # Module 0 is frozen at 2.0, module 1 at 1.0, which does not count.
    two = run(policy, [*GUIDED, found(1.0, 1.0, rate=2.0), found(1.0, 1.0, layer=1)])
    assert frozen_layers(two) == 2
    assert frozen_layers(run(policy, [found(rate=0.21)], two)) == 2
    live = run(policy, [found(rate=0.2)], two)
    assert frozen_layers(live) == 0
    assert compared(policy, live) == (0, 1)


def test_after_unfreezing_half_the_evaluations_are_enough() -> None:
    policy = Egeria(stale=4, window=6)
    frozen = run(policy, [*GUIDED, *[found(1.0)] * 5])
    assert frozen_layers(frozen) == 1
    live = run(policy, [found(rate=0.1)], frozen)
    assert (live.memory["stale"], live.memory["window"]) == (2, 3)
    assert frozen_layers(run(policy, [found(1.0, rate=0.1)], live)) == 0
    again = run(policy, [found(1.0, rate=0.1)] * 3, live)
    assert frozen_layers(again) == 1
    # Measured from the new freeze, at 0.1; a third freeze needs two evaluations.
    assert frozen_layers(run(policy, [found(rate=0.02)], again)) == 1
    third = run(policy, [found(rate=0.01)], again)
    assert (frozen_layers(third), third.memory["stale"], third.memory["window"]) == (0, 1, 2)


def test_halving_ends_at_one_evaluation_and_a_line_through_two() -> None:
    policy = Egeria(stale=1, window=2)
    live = run(policy, [*GUIDED, found(1.0, 1.0), found(rate=0.1)])
    assert (live.memory["stale"], live.memory["window"]) == (1, 2)


@pytest.mark.parametrize("policy", [Egeria(stale=1, unfreeze_at=0.0), Egeria(stale=1)], ids=str)
def test_what_is_frozen_stays_so_without_a_rate_or_without_the_wish(policy: Egeria) -> None:
    rate = 0.0 if policy.unfreeze_at == 0.0 else None
    seen = [*GUIDED, found(1.0, 1.0), Observed(1.0, rate), Observed(1.0, rate)]
    assert frozen_layers(run(policy, seen)) == 1


def at_steps(policy: Egeria, seen: Sequence[Observed], interval: int) -> list[Decision]:
    """Return the decision of each check; checks lie ``interval`` steps apart."""
    decisions = [start(policy)]
    for number, observed in enumerate(seen, start=1):
        check = Check(number, LAYOUT, {}, 7, observed, step=number * interval)
        decisions.append(policy.decide(decisions[-1], check))
    return decisions[1:]


@pytest.mark.parametrize("step", [41, 45, 50])
def test_all_is_live_again_at_the_check_that_follows_a_named_step(step: int) -> None:
    """Checks at steps 10, 20, ..., 70; modules 0 and 1 are frozen at 30 and 40.

    Egeria's hook for cyclical schedules: TorchTitan's do not rise again, other trainers' may.
    """
    policy = Egeria(stale=4, window=6, unfreeze_steps=[step])
    still = [
        found(*[1.0] * n, layer=layer) for n, layer in ((5, 0), (5, 1), (0, 0), (3, 0), (0, 0))
    ]
    decisions = at_steps(policy, [*GUIDED, *still], 10)
    assert [frozen_layers(decision) for decision in decisions] == [0, 0, 1, 2, 0, 1, 1]
    live = decisions[4].memory
    assert (live["stale"], live["window"]) == (2, 3), "halved, as at a low learning rate"


def test_each_named_step_counts_once_and_only_where_something_is_frozen() -> None:
    """Steps 5 and 15 lie in bootstrapping, 25 before anything is frozen; 45 is due at 50."""
    policy = Egeria(stale=1, window=8, unfreeze_steps=[5, 15, 25, 45])
    seen = [*GUIDED, found(), *[found(1.0, 1.0)] * 3]
    decisions = at_steps(policy, seen, 10)
    assert [frozen_layers(decision) for decision in decisions] == [0, 0, 0, 1, 0, 1]
    assert decisions[-1].memory["window"] == 4


def test_named_steps_need_no_learning_rate() -> None:
    policy = Egeria(stale=1, unfreeze_at=0.0, unfreeze_steps=[40])
    seen = [*GUIDED, found(1.0, 1.0), Observed(1.0, None)]
    assert [frozen_layers(decision) for decision in at_steps(policy, seen, 10)] == [0, 0, 1, 0]


# -- the rest --------------------------------------------------------------------------------------


def test_a_run_reloaded_at_every_check_decides_as_one_that_is_not() -> None:
    policy = Egeria(stale=1, window=3)
    rng = np.random.default_rng(3)
    seen = [*GUIDED]
    for rate in np.geomspace(1.0, 1e-3, 60):
        layer = int(rng.integers(0, 3))
        seen.append(found(*rng.choice([0.5, 0.5, 0.6], 2), layer=layer, rate=rate, dropped=1))
    whole = parts = start(policy)
    counts = set()
    for number, observed in enumerate(seen, start=1):
        check = Check(number, LAYOUT, {}, 7, observed)
        whole = policy.decide(whole, check)
        plain = json.loads(json.dumps(dict(parts.memory)))
        assert plain == dict(parts.memory)
        parts = policy.decide(Decision(parts.frozen.copy(), plain), check)
        assert (whole.memory, whole.metrics) == (parts.memory, parts.metrics)
        counts.add(frozen_layers(whole))
    assert counts == {0, 1, 2, 3}, "freezes, and lets go"


def test_ranks_are_put_together() -> None:
    ranks = [
        Observed(None, 0.5, (Difference(9, 0, 0.2),), 1),
        Observed(2.0, 0.5, (), 0),
        Observed(4.0, 0.5, (Difference(6, 0, 0.1),), 2),
    ]
    wanted = (Difference(6, 0, 0.1), Difference(9, 0, 0.2))
    assert together(ranks) == Observed(3.0, 0.5, wanted, 3)
    assert together([Observed(None, None)]) == Observed(None, None)


def test_it_says_how_the_reference_is_run() -> None:
    assert isinstance(Egeria(), ComparesOutputs)
    assert Egeria().reference_settings == ReferenceSettings()
    policy = Egeria(rows="square", max_tokens=9, reference="inline", precision="float32")
    assert policy.reference_settings == ReferenceSettings("inline", "float32", 9, squared=True)


def test_a_model_of_one_module_is_refused() -> None:
    layout = build_layout({0: [("embed", 1), ("layers.0.w", 4), ("head", 1)]})
    with pytest.raises(ValueError, match="makes one module of the model"):
        Egeria().start(Check(0, layout, {}, 7))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_cpu_load": 0.0}, "egeria.max_cpu_load is 0.0; it must be above 0"),
        ({"unfreeze_steps": [9, 0]}, r"egeria.unfreeze_steps is \[9, 0\]; each step must be 1 or"),
        ({"modules": ["a", "("]}, r"egeria.modules has '\(', which is no regular expression"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with arguments_named(lambda argument: argument):
        told = only_error(Egeria(**settings))
    assert re.search(message, told), told
