"""What a policy that compares outputs sees of a pipeline, and what a checkpoint keeps of it."""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.layered import make_parts
from tests.timelyfreeze.helpers.ranks import HandClock
from tests.timelyfreeze.helpers.stages import (
    FULL,
    N_MICROBATCHES,
    Pipeline,
    make_batch,
)
from timelyfreeze.control.build import checks_for
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.policies import Check, Decision, Difference
from timelyfreeze.policies.egeria import Egeria
from timelyfreeze.policies.plasticity import similarity_loss
from timelyfreeze.runtime.reference import CapturedBatch, InlineReference
from timelyfreeze.runtime.reference import comparator as output_watch
from timelyfreeze.settings import FreezeSettings, Step

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]

POLICY = Egeria(
    check_interval=2, window=2, stale=1, tolerance=10.0, bootstrap_change=10.0,
    reference="inline", precision="float32", max_tokens=4,
)  # fmt: skip
# Checks after steps 3, 5, 7 and so on; bootstrapping ends at 5, so 7 is compared first.
SETTINGS = FreezeSettings(last_warmup_step=1).unplanned


class Alone:
    """An exchange of one rank."""

    rank, size = 0, 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


@dataclass
class Noting:
    """A reference that notes what happens to it and answers as it is told to."""

    has_room: bool = True
    answers: list[Difference] = field(default_factory=list)
    lost: int = 0
    happened: list[str] = field(default_factory=list)
    loaded: list[nn.ModuleList] = field(default_factory=list)
    batches: list[CapturedBatch] = field(default_factory=list)

    def load(self, blocks: nn.ModuleList) -> None:
        self.happened.append("load")
        self.loaded.append(blocks)

    def offer(self, batch: CapturedBatch) -> bool:
        self.happened.append(f"offer {batch.step}")
        self.batches.append(batch)
        return self.has_room

    def take(self) -> tuple[list[Difference], int]:
        self.happened.append("take")
        answers, self.answers = self.answers, []
        lost, self.lost = self.lost, 0
        return answers, lost

    def close(self) -> None:
        self.happened.append("close")


class Run:
    """A pipeline of four stages on one rank under a policy, and what its checks saw."""

    def __init__(
        self,
        reference: Any = None,
        *,
        policy: Egeria = POLICY,
        settings: FreezeSettings = SETTINGS,
        exchange: Any = None,
        seed: int = 0,
    ) -> None:
        self.parts = make_parts(seed=seed)
        self.pipeline = Pipeline(self.parts, FULL)
        self.optimizer = torch.optim.SGD(
            [p for part in self.parts for p in part.parameters()], lr=0.01
        )
        self.losses: list[float] = []
        self.phases = settings.phases
        self.seen: list[Check] = []
        self.checks: PolicyRunner = checks_for(
            self.pipeline.stages,
            policy,
            settings,
            exchange or Alone(),
            HandClock(),  # type: ignore[arg-type]
            learning_rate=lambda: self.optimizer.param_groups[0]["lr"],
            make_reference=(lambda wanted: reference) if reference else InlineReference,
        )
        decide = type(policy).decide

        class Seen(type(policy)):  # type: ignore[misc]
            def decide(inner, before: Decision, check: Check) -> Decision:
                self.seen.append(check)
                return decide(policy, before, check)

        self.checks.policy = Seen(**vars(policy))

    def steps(self, first: int, last: int, *, batches: int = 1) -> None:
        for step in range(first, last + 1):
            self.checks.begin_step(self.phases.at(step))
            self.optimizer.zero_grad()
            for number in range(batches):
                ran = self.pipeline.run(batch=make_batch(10 * step + number))
                self.losses.append(float(sum(ran.losses).detach()))
            self.optimizer.step()
            self.checks.end_step(self.phases.at(step))

    def frozen_layers(self) -> int:
        return int(self.checks.decision.metrics["frozen_layers"])


def outputs(parts: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    """What comes out of block 0."""
    first: Any = parts[0]
    with torch.no_grad():
        return first.layers["0"](first.embedding(tokens), first.scale)


def test_plasticity_is_that_of_the_first_microbatch_and_the_weights_of_the_snapshot() -> None:
    run = Run()
    run.steps(1, 5)
    snapshot = copy.deepcopy(run.parts)  # bootstrapping has just ended
    run.steps(6, 6)
    now = copy.deepcopy(run.parts)
    run.steps(7, 7, batches=2)
    tokens = make_batch(70)[0].chunk(N_MICROBATCHES)[0]
    trained = outputs(now, tokens)
    first: Any = now[0]
    old: Any = snapshot[0]
    with torch.no_grad():  # the copy gets the input of the model that trains
        reference = old.layers["0"](first.embedding(tokens), first.scale)
    rows = [0, 1, 3, 4]  # four of six tokens
    wanted = similarity_loss(
        trained.flatten(0, 1)[rows].numpy(), reference.flatten(0, 1)[rows].numpy()
    )
    observed = run.seen[-1].observed
    assert observed is not None
    (difference,) = observed.differences
    assert (difference.step, difference.first) == (7, 0)
    assert difference.value == pytest.approx(wanted, rel=1e-5)
    assert wanted > 0.0


def test_it_freezes_module_after_module() -> None:
    run = Run()
    frozen = []
    for step in range(1, 22):
        run.steps(step, step)
        frozen.append(run.frozen_layers())
    # Evaluations at 7 and 9 freeze block 0, those at 11 and 13 block 1, those at 15 and 17 block 2.
    assert frozen == [0] * 8 + [1] * 4 + [2] * 4 + [3] * 5
    assert run.checks.decision.frozen.tolist() == run.checks.layout.prefix(3).tolist()


def test_the_loss_of_an_interval_is_the_mean_of_its_steps() -> None:
    run = Run()
    run.steps(1, 5, batches=2)
    by_step = [sum(run.losses[2 * i : 2 * i + 2]) for i in range(5)]
    seen = [check.observed.loss for check in run.seen if check.observed is not None]
    assert seen == pytest.approx([sum(by_step[1:3]) / 2, sum(by_step[3:5]) / 2], rel=1e-6)


def test_steps_that_teach_nothing_have_no_loss_and_no_evaluation() -> None:
    # Monitoring: 2-3 upper bound, 4-5 lower bound; counted are 2, 3, 6, 7 and so on.
    reference = Noting()
    run = Run(
        reference,
        settings=FreezeSettings(last_warmup_step=1, last_monitor_step=5, last_ramp_step=6),
    )
    run.steps(1, 9)
    observed = [check.observed for check in run.seen]
    assert [check.number for check in run.seen] == [1, 2, 3]
    wanted = [sum(run.losses[i - 1] for i in pair) / 2 for pair in ((2, 3), (6, 7), (8, 9))]
    assert [seen.loss for seen in observed if seen] == pytest.approx(wanted, rel=1e-6)
    assert [batch.step for batch in reference.batches] == [9]


def test_the_learning_rate_is_that_of_the_step_of_the_check() -> None:
    run = Run()
    for step in range(1, 6):
        run.optimizer.param_groups[0]["lr"] = 0.01 * step
        run.steps(step, step)
    rates = [check.observed.learning_rate for check in run.seen if check.observed is not None]
    assert rates == pytest.approx([0.03, 0.05])


def test_padding_is_left_out_where_it_is_known() -> None:
    reference = Noting()
    run = Run(reference)
    run.steps(1, 6)
    begin = run.checks.begin_step

    def begin_and_note(step: Step) -> None:
        begin(step)
        run.checks.watch.record_tokens(torch.tensor([2, 1, 3, 3, 3, 3, 3, 3]))
        run.checks.watch.record_tokens(torch.tensor([3] * 8))  # of the step's second batch

    run.checks.begin_step = begin_and_note  # type: ignore[method-assign]
    run.steps(7, 7)
    assert reference.batches[0].rows.tolist() == [0, 1, 3]  # rows of 3 tokens


def test_a_reference_that_never_answers_delays_nothing_and_freezes_nothing() -> None:
    reference = Noting(has_room=False)
    run = Run(reference)
    run.steps(1, 13)
    assert reference.happened == [
        "take", "take", "load",  # checks at 3 and 5
        "offer 7", "take", "offer 9", "take", "offer 11", "take", "offer 13", "take",
    ]  # fmt: skip
    assert run.frozen_layers() == 0
    assert run.checks.decision.metrics["dropped_evaluations"] == 4


@pytest.mark.parametrize(
    ("load", "device", "place", "wanted"),
    [
        (0.49, "cuda", "background", False),
        (0.51, "cuda", "background", True),
        (9.0, "cuda", "inline", False),  # or a run could not be repeated
        (9.0, "cpu", "background", False),  # where training itself is the load
    ],
)
def test_a_machine_is_busy_by_its_load_where_a_gpu_trains(
    load: float, device: str, place: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load * (os.cpu_count() or 1), 0.0, 0.0))
    settings = replace(POLICY, reference=place).reference_settings
    assert output_watch.is_busy(settings, torch.device(device)) is wanted


def test_a_busy_machine_leaves_evaluations_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Noting()
    run = Run(reference)
    run.steps(1, 7)
    monkeypatch.setattr(output_watch, "is_busy", lambda settings, device: True)
    run.steps(8, 11)
    assert [batch.step for batch in reference.batches] == [7]
    assert run.checks.decision.metrics["dropped_evaluations"] == 2


def test_answers_count_when_they_come() -> None:
    reference = Noting()
    run = Run(reference)
    run.steps(1, 9)
    assert run.frozen_layers() == 0
    reference.answers = [Difference(9, 0, 1.0), Difference(7, 0, 1.0)]
    reference.lost = 3
    run.steps(10, 11)
    observed = run.seen[-1].observed
    assert observed is not None
    assert [found.step for found in observed.differences] == [7, 9]
    assert run.frozen_layers() == 1
    assert run.checks.decision.metrics["dropped_evaluations"] == 3


def test_a_second_rank_with_the_same_stages_evaluates_nothing() -> None:
    class Second:
        rank, size = 1, 2

        def all_gather(self, value: Any) -> list[Any]:
            return [value, value]

    reference = Noting()
    run = Run(reference, exchange=Second())
    run.steps(1, 7)
    assert not reference.batches
    assert not reference.loaded


def test_ranks_with_other_answers_decide_alike() -> None:
    """Two ranks, of which one evaluates: the other learns what it has found."""
    answers = {7: [1.0], 9: [], 11: [1.0, 1.0], 13: [0.5], 15: [0.5]}
    told: list[Any] = []

    class First:
        rank, size = 0, 2

        def all_gather(self, value: Any) -> list[Any]:
            told.append(value)
            return [value, value] if isinstance(value, dict) else [value, Second.seen()]

    class Second:
        rank, size = 1, 2
        n = 0

        @staticmethod
        def seen() -> Any:
            return type(told[-1])(told[-1].loss, None)

        def all_gather(self, value: Any) -> list[Any]:
            mine = told[Second.n]
            Second.n += 1
            return [mine, value]

    def trace(exchange: Any, reference: Noting, *, answering: bool) -> list[Any]:
        run = Run(reference, exchange=exchange)
        decided = []
        for step in range(1, 16):
            if answering and step in answers:
                layer = run.frozen_layers()
                reference.answers = [Difference(step, layer, v) for v in answers[step]]
            run.steps(step, step)
            decided.append((dict(run.checks.decision.memory), run.checks.decision.metrics))
        return decided

    one = trace(First(), Noting(), answering=True)
    two = trace(Second(), Noting(), answering=False)
    assert one == two
    assert one[-1][1]["frozen_layers"] == 2


def test_blocks_of_the_script_itself_need_an_inline_reference() -> None:
    parts = make_parts()
    kind = type(parts[0].layers["0"])  # type: ignore[index]
    module, kind.__module__ = kind.__module__, "__main__"
    try:
        with pytest.raises(ValueError, match="whose class stands in the script that was started"):
            Run(Noting(), policy=Egeria())
        Run(policy=POLICY)
    finally:
        kind.__module__ = module


def test_closing_ends_the_reference() -> None:
    reference = Noting()
    Run(reference).checks.watch.close()
    assert reference.happened == ["close"]
