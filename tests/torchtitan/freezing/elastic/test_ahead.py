"""When a front may begin with the next step."""

import itertools

from torchtitan.freezing.elastic.ahead import may_begin_next


def test_only_where_nothing_lies_between_two_steps() -> None:
    for validates, saves, decides in itertools.product((False, True), repeat=3):
        for step in (1, 9, 10):
            found = may_begin_next(step, 10, validates=validates, saves=saves, decides=decides)
            assert found == (step < 10 and [validates, saves, decides] == [False] * 3)
