"""The library in a trainer of one's own, all stages in one process."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from tests.timelyfreeze.helpers.layered import make_parts
from tests.timelyfreeze.helpers.stages import (
    EVERY,
    FULL,
    N_MICROBATCHES,
    SINGLE,
    SPLIT,
    Ran,
    assert_equal,
    expected,
    make_batch,
    make_modules,
    modules_for,
    sum_loss,
)
from timelyfreeze import TimelyFreeze, api
from timelyfreeze.policies.policy import Check, Decision, Measurement, Metric, Source
from timelyfreeze.runtime import FreezingStage, stages_of
from timelyfreeze.schedule import Action
from timelyfreeze.settings import Phase

pytestmark = pytest.mark.usefixtures("one_rank")

SHORT = {
    "last_warmup_step": 1,
    "last_monitor_step": 7,
    "last_ramp_step": 9,
    "discard_batches": 1,
    "min_gain": -1.0,
}


def plain_schedule(modules: list[nn.Module], kind: type = FULL, **options: Any) -> Any:
    stages = [
        PipelineStage(module, i, len(modules), torch.device("cpu"))
        for i, module in enumerate(modules)
    ]
    options = {"loss_fn": sum_loss, "scale_grads": False, **options}
    is_single = kind in SINGLE
    return kind(stages[0] if is_single else stages, N_MICROBATCHES, **options)


class Loop:
    """A trainer as a user writes it, which keeps what the masks were."""

    def __init__(self, kind: type = FULL, *, lr: float = 0.1, **arguments: Any) -> None:
        self.modules = make_named_modules() if kind is FULL else modules_for(kind)
        self.schedule = plain_schedule(self.modules, kind)
        parameters = [p for module in self.modules for p in module.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=lr)
        self.plans: list[Any] = []
        self.freezer = TimelyFreeze(
            self.schedule,
            **{**SHORT, "on_plan": lambda plan, bounds: self.plans.append(plan), **arguments},
        )
        self.masks: dict[int, dict[int, np.ndarray]] = {}
        self.executed: list[Action] = []
        for stage in stages_of(self.schedule):
            stage.freeze = self._noting(stage)

    def _noting(self, stage: FreezingStage) -> Callable[..., None]:
        def freeze(masks: Any, **kwargs: Any) -> None:
            self.masks[stage.stage_index] = {m: mask.copy() for m, mask in masks.items()}
            FreezingStage.freeze(stage, masks, **kwargs)

        return freeze

    def train(self, first: int, last: int, *, batches: int = 1) -> list[Any]:
        seen = []
        for t in range(first, last + 1):
            losses: list[Any] = []
            with self.freezer.step(t):
                for n in range(batches):
                    tokens, labels = make_batch(10 * t + n)
                    self.schedule.step(tokens, target=labels, losses=losses)
            seen.append([[p.grad for p in m.parameters()] for m in self.modules])
            self.optimizer.step()
            self.optimizer.zero_grad()
        return seen

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for module in self.modules for p in module.parameters()]


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_the_masked_reference_under_every_schedule(kind: type) -> None:
    loop = Loop(kind, lr=0.0, skip_input_grads="off")
    recorder = loop.freezer._controller._recorder
    phases = set()
    for t in range(1, 12):
        batch = make_batch(10 * t)
        (found,) = loop.train(t, t)
        phases.add(loop.freezer.phase)
        unread = recorder._finished[-1]
        order = [action for action, _, _ in unread]
        wanted = expected(loop.modules, order, loop.masks, batch)
        assert_equal(Ran(found, wanted.losses, wanted.sent), wanted)
    assert phases == {Phase.WARMUP, Phase.UPPER_BOUND, Phase.LOWER_BOUND, Phase.RAMP, Phase.STABLE}
    assert loop.freezer.plan is loop.plans[0]
    assert len(loop.plans) == 1
    assert loop.freezer.bounds is not None


def test_several_batches_make_one_step_with_masks_of_their_own() -> None:
    loop = Loop(lr=0.0, skip_input_grads="off")
    seen: list[dict[int, dict[int, list[bool]]]] = []
    run = loop.freezer._controller.one_batch

    def one_batch() -> Any:
        seen.append({s: {m: v.tolist() for m, v in of.items()} for s, of in loop.masks.items()})
        return run()

    loop.freezer._controller.one_batch = one_batch  # type: ignore[method-assign]
    loop.train(1, 11, batches=2)
    assert len(seen) == 22
    assert loop.freezer.report().batch_ms.keys() >= {Phase.UPPER_BOUND, Phase.STABLE}


def test_evaluation_freezes_nothing_and_is_not_timed() -> None:
    loop = Loop(SINGLE[1], max_freeze_ratio=1.0)
    loop.train(1, 10)
    before = len(loop.freezer._controller._recorder._finished)
    losses: list[Any] = []
    tokens, labels = make_batch()
    loop.schedule.eval(tokens, target=labels, losses=losses)
    assert len(losses) == N_MICROBATCHES
    assert len(loop.freezer._controller._recorder._finished) == before
    loop.train(11, 11)


def test_a_batch_outside_of_a_step_is_refused_until_it_is_closed() -> None:
    loop = Loop()
    tokens, labels = make_batch()
    with pytest.raises(RuntimeError, match=r"outside of `with freezer\.step\(t\):`"):
        loop.schedule.step(tokens, target=labels)
    inside = pytest.raises(RuntimeError, match="step 2 begins inside step 1")
    with loop.freezer.step(1), inside, loop.freezer.step(2):
        pytest.fail("step 2 began inside step 1")
    run = type(loop.schedule)._step_microbatches
    with loop.freezer as freezer:
        assert freezer is loop.freezer
    assert loop.schedule._step_microbatches.__func__ is run
    assert loop.schedule._loss_fn is sum_loss
    loop.schedule.step(tokens, target=labels)


@pytest.mark.parametrize("method", ["timelyfreeze", "timelyfreeze+apf"])
@pytest.mark.parametrize("stopped", [5, 10])
def test_a_resumed_run_goes_on_with_the_same_state(method: str, stopped: int) -> None:
    arguments: dict[str, Any] = {"method": method}
    if method != "timelyfreeze":
        arguments["policy"] = {"check_interval": 2}
    first = Loop(**arguments)
    first.train(1, stopped)
    state = first.freezer.state_dict()
    assert sorted(state)[0] == "rank_0"
    second = Loop(**arguments)
    second.freezer.load_state_dict(state)
    again = second.freezer.state_dict()
    assert again.keys() == state.keys()
    assert again["rank_0"] == state["rank_0"]
    if first.freezer.plan is not None:
        assert second.freezer.plan is not None
        assert second.freezer.plan.ratios.tolist() == first.freezer.plan.ratios.tolist()
    second.train(stopped + 1, 11)
    assert second.freezer.plan is not None


def test_a_policy_of_ones_own_decides_alone_after_each_step_of_the_optimizer() -> None:
    events: list[str] = []

    class Watching:
        """Freezes the first tensor once it has seen a gradient."""

        check_interval = 1

        @property
        def measurement(self) -> Any:
            return Measurement(Source.GRADIENTS, (Metric.ABS_SUM,))

        def errors(self) -> Iterator[str]:
            return iter(())

        def start(self, check: Check) -> Decision:
            return Decision(np.zeros(len(check.layout.names), dtype=np.bool_))

        def decide(self, before: Decision, check: Check) -> Decision:
            events.append("decided")
            found = check.metrics[Metric.ABS_SUM]
            assert (found > 0.0).any(), "gradients are still there"
            frozen = np.zeros(len(found), dtype=np.bool_)
            frozen[0] = True
            return Decision(frozen)

        def __repr__(self) -> str:
            return "Watching()"

    with pytest.raises(ValueError, match=r"optimizer is None; Watching\(\) watches gradients"):
        Loop(method=Watching())
    modules = make_named_modules()
    schedule = plain_schedule(modules)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    freezer = TimelyFreeze(schedule, method=Watching(), last_warmup_step=1, optimizer=optimizer)
    first = next(modules[0].parameters())
    tokens, labels = make_batch()
    for t in range(1, 5):
        with freezer.step(t):
            schedule.step(tokens, target=labels)
        events.append("frozen" if first.grad is None else "live")
        optimizer.step()
        optimizer.zero_grad()
    assert events == ["live", "live", "decided", "frozen", "decided", "frozen", "decided"]


def test_outputs_are_compared_and_the_learning_rate_is_that_of_the_optimizer() -> None:
    settings = {
        "check_interval": 1, "window": 2, "stale": 1, "bootstrap_change": 10.0,
        "tolerance": 10.0, "reference": "inline",
    }  # fmt: skip
    modules = make_parts()
    schedule = plain_schedule(modules)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.01)
    arguments: Any = {"last_warmup_step": 1, "method": "egeria", "policy": settings}
    with pytest.raises(ValueError, match=r"optimizer is None; Egeria\(.* at the learning rate"):
        TimelyFreeze(schedule, **arguments)
    tokens, labels = make_batch()
    n_frozen = []
    with TimelyFreeze(schedule, optimizer=optimizer, **arguments) as freezer:
        for t in range(1, 11):
            optimizer.param_groups[0]["lr"] = 0.01 if t < 9 else 0.001
            with freezer.step(t):
                schedule.step(tokens, target=labels)
            n_frozen.append(
                sum(all(p.grad is None for p in module.parameters()) for module in modules)
            )
            optimizer.step()
            optimizer.zero_grad()
    # Losses of steps 2 and 3 end bootstrapping; from step 4 on every second evaluation freezes a
    # block; a tenth of the learning rate in step 9 lets go.
    assert n_frozen == [0, 0, 0, 0, 0, 1, 1, 2, 2, 0]


@pytest.mark.parametrize("method", ["fixed", "timelyfreeze+fixed"])
def test_named_tensors_are_frozen(method: str) -> None:
    names = {"names": ["layers.1", "*.3.*bias"]}
    loop = Loop(method=method, policy=names, max_freeze_ratio=0.5, gradient_rank=0)
    chosen = [n for m in loop.modules for n, _ in m.named_parameters() if _is_named(n)]
    assert 0 < len(chosen) < len(list(loop.weights()))
    *_, last = loop.train(1, 12)
    without = {
        name
        for module, grads in zip(loop.modules, last, strict=True)
        for (name, _), grad in zip(module.named_parameters(), grads, strict=True)
        if grad is None
    }
    if method == "fixed":
        assert without == set(chosen)
    else:
        checks = loop.freezer._controller.checks
        assert checks is not None
        assert loop.plans
        frozen = checks.decision.frozen
        assert {checks.layout.names[i] for i in np.flatnonzero(frozen)} == set(chosen)


def _is_named(name: str) -> bool:
    return name.startswith("layers.1.") or (name.startswith("layers.3.") and name.endswith("bias"))


def test_a_name_that_no_tensor_has_is_told_when_the_trainer_is_made() -> None:
    with pytest.raises(ValueError, match=r"^fixed.names has 'layers\.9'; .* names are layers\."):
        Loop(method="fixed", policy={"names": ["layers.9"]})


def make_named_modules() -> list[nn.Module]:
    """Stages whose tensors have layer numbers, unique over the model."""

    class Numbered(nn.Module):
        def __init__(self, number: int, module: nn.Module) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({str(number): module})

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                hidden = layer(hidden)
            return hidden

    return [Numbered(i, module) for i, module in enumerate(make_modules())]


def test_settings_of_a_policy_are_those_of_its_name() -> None:
    modules = make_named_modules()
    schedule = plain_schedule(modules)
    freezer = TimelyFreeze(schedule, method="fixed", policy={"layers": 2}, last_warmup_step=0)
    tokens, labels = make_batch()
    with freezer.step(1):
        schedule.step(tokens, target=labels)
    with_gradient = [any(p.grad is not None for p in m.parameters()) for m in modules]
    assert with_gradient == [False, False, True, True]


def test_stages_of_any_kind_are_adopted_or_refused() -> None:
    class Own(PipelineStage):
        """A stage that a user's spec has built."""

    schedule = plain_schedule(make_modules())
    stages = stages_of(schedule)
    stages[1].__class__ = Own
    freezer = TimelyFreeze(schedule, **SHORT)
    assert all(isinstance(stage, FreezingStage) for stage in stages)
    assert isinstance(stages[1], Own)
    assert type(stages[1]).__name__ == "FreezingOwn"
    freezer.close()
    without_loss = plain_schedule(make_modules(), SPLIT, loss_fn=None)
    with pytest.raises(ValueError, match="schedule has no loss_fn"):
        TimelyFreeze(without_loss, **SHORT)
    replicated = plain_schedule(make_modules())
    stage = stages_of(replicated)[2]
    stage.submod = nn.parallel.DistributedDataParallel(stage.submod)
    with pytest.raises(ValueError, match="stage 2 is wrapped in DistributedDataParallel"):
        TimelyFreeze(replicated, **SHORT)


def test_a_report_tells_what_was_measured_and_planned() -> None:
    loop = Loop()
    loop.train(1, 3)
    early = loop.freezer.report()
    assert early.phase is Phase.UPPER_BOUND
    assert early.planned_batch_ms is None
    assert "not measured with" in str(early)
    loop.train(4, 14)
    report = loop.freezer.report()
    plan = loop.freezer.plan
    assert plan is not None
    assert (report.step, report.phase) == (14, Phase.STABLE)
    assert report.planned_batch_ms == plan.batch_ms
    assert dict(report.planned_ratios) == plan.stage_mean_ratios()
    assert report.measured_unfrozen_ms is not None
    assert report.measured_frozen_ms is not None
    lines = str(report).splitlines()
    assert lines[0] == "TimelyFreeze, step 14, phase stable"
    assert [line.split("  ")[0] for line in lines[1:6]] == [
        "batch measured",
        "batch predicted",
        "it missed by",
        "it holds for",
        "planned ratios",
    ]
    assert lines[4].startswith(
        "it holds for     a device or core of its own for each rank; 9 of 10 batches within -"
    )


def test_what_was_measured_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_COLLECT_EVERY", 2)
    loop = Loop(method="apf", policy={"check_interval": 1}, last_warmup_step=4)
    loop.train(1, 9)
    assert len(loop.freezer._controller.log._untold) <= 2
    assert loop.freezer.report().batch_ms.keys() == {Phase.WARMUP, Phase.STABLE}


def test_phases_are_logged_under_the_librarys_words(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="timelyfreeze"):
        Loop(min_gain=1e6).train(1, 8)
    (off,) = [r.getMessage() for r in caplog.records if "switched off" in r.getMessage()]
    assert off.endswith("under min_gain (1e+06)")
