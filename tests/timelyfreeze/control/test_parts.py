"""The list of parts: in which order they are called, and what is told where ranks have others."""

import pytest

from tests.timelyfreeze.helpers.ranks import Ranks
from timelyfreeze.control.parts import check_same_parts
from timelyfreeze.runtime import Masks, StepPart
from timelyfreeze.schedule.order import one_f_one_b_order, parse_order
from timelyfreeze.settings.phases import Step

ORDER = one_f_one_b_order(2, 4)


def test_ranks_with_other_parts_are_told_which() -> None:
    ranks = Ranks(ORDER)
    ranks.controllers[1].parts.pop(1)

    def errors() -> set[str]:
        def of_rank(rank: int) -> str:
            with pytest.raises(ValueError, match=r"every rank needs the same settings") as found:
                check_same_parts(ranks.controllers[rank].parts, ranks.exchanges[rank])  # type: ignore[arg-type]
            return str(found.value)

        return set(ranks.on_all(of_rank))

    (error,) = errors()
    assert "on rank 1, which differ in control steps;" in error
    ranks.controllers[1].parts[:] = ranks.controllers[0].parts[::-1]
    (error,) = errors()
    assert "which differ in their order;" in error
    ranks.controllers[1].parts.reverse()
    ranks.on_all(
        lambda rank: check_same_parts(ranks.controllers[rank].parts, ranks.exchanges[rank])
    )  # type: ignore[arg-type]


def test_parts_begin_in_order_and_end_in_the_opposite_one() -> None:
    ranks, calls = Ranks(parse_order(["0F0 0B0"]), batches_per_step=1), []

    class Noted(StepPart):
        def __init__(self, number: int) -> None:
            self.number = number

        def begin_step(self, step: Step) -> None:
            calls.append(("begin", self.number))

        def end_batch(self, number: int, masks: Masks) -> None:
            calls.append(("batch", self.number))

        def end_step(self, step: Step) -> None:
            calls.append(("end", self.number))

    ranks.controllers[0].parts[1:1] = [Noted(1), Noted(2)]
    ranks.run(1, 1)
    assert calls == [
        *(("begin", 1), ("begin", 2), ("batch", 1), ("batch", 2)),
        *(("end", 2), ("end", 1)),
    ]
