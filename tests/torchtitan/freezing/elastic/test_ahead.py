"""When a front may begin with the next step."""

import itertools
from types import SimpleNamespace
from typing import Any

from torchtitan.freezing.elastic.ahead import RunningAhead


def may_begin(step: int, *, validates: bool, saves: bool, decides: bool, left: int = 0) -> bool:
    config = SimpleNamespace(
        training=SimpleNamespace(steps=10), validation=SimpleNamespace(enable=True)
    )
    trainer: Any = SimpleNamespace(
        step=step, job_config=config,
        controller=SimpleNamespace(checks=SimpleNamespace(decides=decides)),
        checkpointer=SimpleNamespace(saves_after=lambda step: saves),
        validator=SimpleNamespace(should_validate=lambda step: validates),
    )  # fmt: skip
    part = RunningAhead()
    part.trainer, part._n_batches_left = trainer, left
    vars(part)["_ahead"] = SimpleNamespace(n_front=1)
    return part._may_begin_next


def test_only_where_nothing_lies_between_two_steps() -> None:
    for validates, saves, decides in itertools.product((False, True), repeat=3):
        for step in (1, 9, 10):
            found = may_begin(step, validates=validates, saves=saves, decides=decides)
            assert found == (step < 10 and [validates, saves, decides] == [False] * 3)
    assert not may_begin(1, validates=False, saves=False, decides=False, left=1)
