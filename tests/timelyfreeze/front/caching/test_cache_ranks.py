"""The cache along the steps where several ranks or replicas have to agree."""

from types import SimpleNamespace

import pytest
import torch

from tests.timelyfreeze.helpers.cached_run import BATCHES, DAG, LAYOUT, Run, cuts, frozen
from timelyfreeze.front.caching import ActivationStore, FrontCache, Row
from timelyfreeze.front.caching.verdict import N_COMPUTED
from timelyfreeze.settings import Phase, Step


class Talk:
    """Ranks that step together in one thread: each says its part, then all hear everyone's."""

    def __init__(self, *others: object) -> None:
        self.rank, self.size = 0, 1 + len(others)
        self.gathered: list[object] = []
        self._others = list(others)

    def all_gather(self, value: object) -> list[object]:
        self.gathered.append(value)
        if isinstance(value, tuple):  # digests, fronts that are there, who writes
            other = dict.fromkeys(("layers.0", "layers.1"), "1"), set(), None
            return [value, *[other] * (self.size - 1)]
        return [value, *self._others]


def front_rank(*others: object) -> tuple[FrontCache, Talk]:
    """A rank that holds the first stage and has seen the batches that are computed in any case."""
    talk = Talk(*others)
    parameters = {name: torch.zeros(1) for name in ("embedding", "layers.0")}
    store = ActivationStore(1 << 20, None)
    cache = FrontCache(store, LAYOUT, parameters, [0], DAG, talk, "model", lambda: frozen(1))  # type: ignore[arg-type]
    cache.begin_step(Step(1, Phase.STABLE))
    for number in range(N_COMPUTED):
        cache.entry(number)
    return cache, talk


def test_all_ranks_take_the_word_of_the_one_that_reads() -> None:
    """A rank in front of the live stages has no rows, and learns that batches pass it by."""
    cache, talk = front_rank([[True], [False]])
    cache.name_batches(BATCHES)
    assert talk.gathered[-1] == [[None], [None]]
    entries = [cache.entry(number) for number in range(2)]
    assert cuts(entries) == [True, False]
    assert entries[0] is not None
    assert entries[0].start is not None
    assert entries[0].start.stage == 1
    assert len(entries[0].inputs) == 0
    cache.close()


@pytest.mark.parametrize(
    ("first", "second", "begins"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_a_batch_begins_behind_the_front_only_where_all_replicas_have_its_rows(
    first: bool, second: bool, begins: bool
) -> None:
    """Of two pipelines of two ranks; else one would gather parameters that the other does not."""
    cache, _ = front_rank([[first]], [[None]], [[second]])
    cache.name_batches(BATCHES[:1])
    assert cuts([cache.entry(0)]) == [begins]
    cache.close()


def beside(run: Run, told: list[bool | None]) -> None:
    """Let there be another replica, which has so much of a batch, front by front, and reads it."""

    def says(value: object) -> object:
        if isinstance(value, list):
            return [told if len(value[0]) == len(told) else [True]]
        return value

    run.cache.exchange = SimpleNamespace(
        all_gather=lambda value: [value, says(value)],
        rank=0,
        size=2,
    )


@pytest.mark.parametrize("other_has", [True, False])
def test_a_replica_computes_rows_that_it_has_where_another_has_not(
    run: Run, other_has: bool
) -> None:
    for _ in range(3):
        run.step(1)
    used = run.store.memory_used
    beside(run, [other_has])
    assert cuts(run.step(1, BATCHES[:1])) == [other_has]
    assert run.store.memory_used == used, "kept twice"


@pytest.mark.parametrize(("told", "start"), [([False, False], None), ([False, True], (1, 0))])
def test_replicas_go_on_from_a_shallower_front_only_together(
    run: Run, told: list[bool | None], start: tuple[int, int] | None
) -> None:
    later = [[Row(number, "") for number in (8, 9, 10, 11)]]
    for _ in range(2):
        run.step(1, [*BATCHES, *later])
    for _ in range(2):
        run.step(2)  # computed in any case
    beside(run, told)
    (entry,) = run.step(2, later)
    assert entry is not None
    assert entry.start == start
    assert entry.tapped == (1, 1), "kept at the new depth in both cases"
    # Each of the 12 rows is kept at both depths.
    assert run.store.memory_used == 2 * 12 * 4


def test_a_batch_that_another_replica_cannot_read_after_all_is_computed(run: Run) -> None:
    for _ in range(3):
        run.step(1)
    answers = iter([[True], [False]])
    run.cache.exchange = SimpleNamespace(
        all_gather=lambda value: [value, [next(answers)]], rank=0, size=2
    )
    assert cuts(run.step(1, BATCHES[:1])) == [False]
