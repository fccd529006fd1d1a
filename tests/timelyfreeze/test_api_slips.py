"""Slips in a trainer of one's own that would go unseen, or be told in other words than ours."""

from typing import Any

import pytest
from torch import nn

from tests.timelyfreeze.helpers.stages import make_batch, make_modules
from tests.timelyfreeze.test_api import SHORT, Loop, plain_schedule
from timelyfreeze import TimelyFreeze, api
from timelyfreeze.policies.apf import Apf
from timelyfreeze.policies.fixed import Fixed
from timelyfreeze.runtime import Exchange

pytestmark = pytest.mark.usefixtures("one_rank")


def test_gradients_that_are_left_over_are_refused_before_they_move_what_is_frozen() -> None:
    loop = Loop(method="fixed", policy={"layers": 2}, last_warmup_step=0)
    tokens, labels = make_batch()
    for again in (True, False):  # several batches of one step add their gradients up
        with loop.freezer.step(1 if again else 2):
            loop.schedule.step(tokens, target=labels)
            if again:
                loop.schedule.step(tokens, target=labels)
        loop.optimizer.zero_grad()
    with loop.freezer.step(3):
        loop.schedule.step(tokens, target=labels)
    loop.optimizer.zero_grad(set_to_none=False)
    left = pytest.raises(RuntimeError, match=r"'layers\.2.* has a gradient when step 4 .*none=T")
    with left, loop.freezer.step(4):
        loop.schedule.step(tokens, target=labels)


@pytest.mark.parametrize("t", [2, 3])
def test_steps_count_upwards(t: int) -> None:
    loop = Loop()
    loop.train(1, 3)
    with pytest.raises(ValueError, match=f"step {t} comes after step 3"):
        loop.train(t, t)


class Elsewhere(Exchange):
    """Another rank that says the same as this one but for what ``differs``, or is gone."""

    def __init__(self, differs: dict[str, str] | None = None) -> None:
        super().__init__()
        self.differs = differs

    def all_gather(self, value: Any) -> list[Any]:
        if self.differs is None:
            raise RuntimeError("Connection closed by peer")
        return [value, value | self.differs]


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"seed": "43"}, "^seed is 42 on rank 0 and 43 on rank 1; every rank needs the same"),
        ({"optimizer": "given"}, "^optimizer is None on rank 0 and given on rank 1"),
        ({"policy": "Fixed(layers=3)"}, "^policy is NoneType on rank 0 and Fixed.layers=3. on"),
    ],
)
def test_arguments_are_those_of_every_rank(
    differs: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "exchange_of", lambda *groups: Elsewhere(differs))
    with pytest.raises(ValueError, match=message):
        Loop()


@pytest.mark.parametrize("call", ["report", "state_dict"])
def test_a_rank_alone_is_told_to_call_with_the_others(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    loop.train(1, 2)
    for holder in (loop.freezer, loop.freezer._controller):
        monkeypatch.setattr(holder, "_exchange", Elsewhere())
    with pytest.raises(RuntimeError, match=rf"^{call}\(\) failed .* by peer; every rank must"):
        getattr(loop.freezer, call)()


def test_a_run_that_ends_before_its_plan_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    loop.train(1, 5)
    told = "a plan is made after step 7 (last_monitor_step), and this is 5"
    assert str(loop.freezer.report()).endswith(f"nothing is frozen by a plan: {told}")
    loop.freezer.close()
    assert f"Nothing was frozen by a plan: {told}" in caplog.text


def test_names_that_a_policy_cannot_use_come_with_a_remedy() -> None:
    schedule = plain_schedule([nn.Sequential(module) for module in make_modules()])
    with pytest.raises(ValueError, match=r"is in the model twice; .* nn.ModuleDict\({'3': block"):
        TimelyFreeze(schedule, method="timelyfreeze+apf", **SHORT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_freeze_ratio": [0.5, 0.5]}, "max_freeze_ratio has 2 values; .* the 4 stages"),
        (
            {"last_warmup_step": 4, "last_monitor_step": 5},
            r"last_monitor_step is 5; .* above last_warmup_step \(4\)",
        ),
        ({"seed": -1}, "seed is -1; it must be 0 or more"),
        (
            {"discard_batches": 3},
            r"discard_batches is 3; .* \(last_warmup_step 1 to last_monitor_step 7\)",
        ),
        ({"method": "none"}, "method is 'none', which freezes nothing"),
        ({"method": "lora"}, "method is 'lora', which is for training with TorchTitan"),
        ({"method": "afp"}, "method is 'afp', nearest to 'apf'; known: "),
        ({"method": "apf", "policy": {"treshold": 1}}, "policy has treshold; apf knows: "),
        ({"method": "apf", "policy": {"threshold": 2.0}}, "apf.threshold is 2.0"),
        ({"method": "apf", "policy": Fixed()}, r"policy is Fixed\(.*\), but method is 'apf'"),
        ({"method": Apf(), "policy": {}}, "method is a policy already"),
        ({"policy": {"threshold": 0.1}}, "method 'timelyfreeze' names no policy"),
    ],
)
def test_arguments_are_refused_by_their_own_names(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Loop(**arguments)
    assert "freezing." not in str(error.value)
