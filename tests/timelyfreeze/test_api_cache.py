"""The activation cache in a trainer of one's own, all stages in one process."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.layered import EVEN_WIDTH, make_parts
from tests.timelyfreeze.helpers.rows import BATCH, N_ROWS, NumberedRows
from tests.timelyfreeze.helpers.stages import (
    FULL,
    N_MICROBATCHES,
    SINGLE,
    SPLIT,
    V_SHAPED,
)
from tests.timelyfreeze.test_api import plain_schedule
from timelyfreeze import ActivationCache, Row, TimelyFreeze
from timelyfreeze.front.caching.verdict import N_COMPUTED, CacheDecision

pytestmark = pytest.mark.slow

EPOCHS = 3
MEMORY = ActivationCache(memory_gib=1.0, embedding="embedding")
LAYERS_OF = {FULL: (4, 1), SPLIT: (4, 1), V_SHAPED[0]: (2, 2), SINGLE[1]: (1, 4)}


@pytest.fixture(autouse=True)
def _one_process(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # A model this small computes faster than anything is read.
    monkeypatch.setattr(CacheDecision, "pays", True)


class Loop:
    """A trainer as a user writes it, which keeps losses."""

    def __init__(
        self, cache: ActivationCache | None, kind: type = FULL, *, seed: int = 0, **arguments: Any
    ) -> None:
        self.modules: Sequence[nn.Module] = make_parts(
            *LAYERS_OF[kind], seed=seed, width=EVEN_WIDTH
        )
        self.schedule = plain_schedule(list(self.modules), kind)
        self.optimizer = torch.optim.SGD(
            [p for module in self.modules for p in module.parameters()], lr=0.05
        )
        arguments = {"method": "fixed", "policy": {"layers": 3}, "last_warmup_step": 1, **arguments}
        self.freezer = TimelyFreeze(
            self.schedule, cache=cache, optimizer=self.optimizer, **arguments
        )
        self.caches = cache is not None
        self.data = NumberedRows()
        self.losses: list[Tensor] = []

    def batch(self, numbers: Sequence[int]) -> None:
        tokens, labels = self.data.batch(numbers)
        self.schedule.step(tokens, target=labels, losses=(losses := []))
        self.losses += losses

    def train(self, batches: Sequence[Sequence[int]], *, per_step: int = 1) -> None:
        steps = range(0, len(batches), per_step)
        for t, first in enumerate(steps, start=1):
            mine, rest = batches[first : first + per_step], batches[first + per_step :]
            named: dict[str, Any] = {}
            if self.caches:
                named = {"rows": [self.data.rows(numbers) for numbers in mine], "upcoming": rest}
            with self.freezer.step(t, **named):
                for numbers in mine:
                    self.batch(numbers)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.flush()

    def flush(self) -> None:
        """Let the writer, for which no step waits, catch up."""
        cache = self.freezer._controller.cache
        if cache is not None:
            cache.store.flush()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for module in self.modules for p in module.parameters()]


def assert_same(one: Loop, other: Loop) -> None:
    assert len(one.losses) == len(other.losses)
    assert all(map(torch.equal, one.losses, other.losses))
    assert all(map(torch.equal, one.weights(), other.weights()))


@pytest.mark.parametrize("kind", LAYERS_OF, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("per_step", [1, 3])
def test_what_is_learned_is_the_same_to_the_last_bit(kind: type, per_step: int) -> None:
    plain, cached = Loop(None, kind), Loop(MEMORY, kind)
    for loop in (plain, cached):
        loop.train(NumberedRows().order(EPOCHS), per_step=per_step)
    assert_same(plain, cached)
    report = cached.freezer.report()
    assert report.cache is not None
    # Nothing is frozen in step 1. Of the other batches, those whose rows came in it and the first
    # ones are computed; each of the last epoch is read.
    assert report.cache.batches == 9 - per_step
    assert 3 <= report.cache.entered <= 9 - per_step - N_COMPUTED
    (line,) = [line for line in str(report).splitlines() if line.startswith("activation cache")]
    assert f" {report.cache.entered} of {report.cache.batches} batches began behind" in line
    assert plain.freezer.report().cache is None
    for loop in (plain, cached):
        loop.freezer.close()


def test_a_front_that_grows_is_read_at_each_depth() -> None:
    arguments: Any = {"method": "linear", "policy": {"check_interval": 7, "max_layers": 2}}
    plain, cached = Loop(None, **arguments), Loop(MEMORY, **arguments)
    for loop in (plain, cached):
        loop.train(NumberedRows().order(8))
    assert_same(plain, cached)
    report = cached.freezer.report()
    assert report.cache is not None
    assert report.cache.entered > 3
    cached.freezer.close()


def test_files_are_written_at_the_end_and_read_ahead_by_a_run_that_goes_on(tmp_path: Path) -> None:
    disk = ActivationCache(
        memory_gib=0.0, disk_gib=1.0, folder=str(tmp_path), identity="a", embedding="embedding"
    )
    first = Loop(disk, last_warmup_step=0)
    first.train(NumberedRows().order(1))
    first.freezer.close()
    assert len(list(tmp_path.rglob("*.safetensors"))) == N_ROWS
    entered = {}
    for identity in "ab":
        # The frozen front has the weights that it had; only the model behind it has learned.
        again = Loop(
            ActivationCache(**{**vars(disk), "identity": identity}),
            last_warmup_step=0,
        )
        again.train(NumberedRows().order(2))
        use = again.freezer.report().cache
        assert use is not None
        assert use.read_ahead > 0
        entered[identity] = use.entered
        again.freezer.close()
        again.freezer.close()
    assert entered == {"a": 6 - N_COMPUTED, "b": 3}


def test_validation_runs_through_the_front() -> None:
    loop = Loop(MEMORY, SINGLE[1], last_warmup_step=0)
    tokens, labels = loop.data.batch(range(BATCH))
    loop.train(NumberedRows().order(2)[:5])
    with torch.no_grad():
        # By microbatch: other sizes of a product may round otherwise.
        wanted = torch.cat([loop.modules[0](rows) for rows in tokens.chunk(N_MICROBATCHES)])
    with loop.freezer.step(6, [loop.data.rows(range(BATCH))]):
        found = loop.schedule.eval(tokens, target=labels, losses=[])
        loop.batch(range(BATCH))
    assert torch.equal(found, wanted)
    loop.freezer.close()


@pytest.mark.parametrize(
    ("cache", "arguments", "message"),
    [
        (
            MEMORY,
            {"method": "timelyfreeze", "policy": None, "last_warmup_step": 60},
            "cache is given, and method is 'timelyfreeze', whose plan .* a policy without a plan",
        ),
        (ActivationCache(memory_gib=-1.0), {}, r"cache\.memory_gib is -1\.0; it must be 0 or more"),
        (
            ActivationCache(memory_gib=0.0),
            {},
            r"cache\.memory_gib is 0\.0, and cache\.disk_gib too",
        ),
        (
            ActivationCache(disk_gib=2.0),
            {},
            r"cache\.identity is empty, and cache\.disk_gib is 2\.0; files outlive a run",
        ),
        (
            ActivationCache(disk_gib=2.0, identity="a", folder=__file__),
            {},
            r"cache\.folder is '.*', and '.*' is no folder; name another",
        ),
        (ActivationCache(), {}, "a first stage whose embedding is 'tok_embeddings'; Part has none"),
        (ActivationCache(layers="blocks"), {}, "an nn.ModuleDict 'blocks'; Part has none"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    cache: ActivationCache, arguments: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Loop(cache, **arguments)
    assert "freezing." not in str(error.value)


def test_a_freezer_that_is_refused_lets_go_of_the_folder(tmp_path: Path) -> None:
    disk = ActivationCache(disk_gib=1.0, folder=str(tmp_path), identity="a", embedding="embedding")
    with pytest.raises(ValueError, match=r"fixed\.layers is 9; the model has 4"):
        Loop(disk, policy={"layers": 9})
    loop = Loop(disk)
    with pytest.raises(ValueError, match=r"cache\.folder is '.*', which another run uses"):
        Loop(disk)
    loop.freezer.close()


def run_step(loop: Loop, step: int, rows: Any, batches: Sequence[Sequence[int]]) -> None:
    with loop.freezer.step(step, rows):
        for numbers in batches:
            loop.batch(numbers)


def refusal(loop: Loop, step: int, rows: Any, *batches: Sequence[int]) -> str:
    loop.optimizer.zero_grad()
    with pytest.raises(ValueError, match=f"step {step} ") as error:
        run_step(loop, step, rows, batches)
    return str(error.value)


def test_rows_that_are_not_those_of_the_batches_are_refused() -> None:
    loop, plain = Loop(MEMORY), Loop(None)
    batch, other = range(BATCH), range(BATCH, 2 * BATCH)
    rows = loop.data.rows(batch)
    assert refusal(loop, 1, None).startswith(
        "step 1 has no rows, which the cache needs: freezer.step(t, rows=[[Row("
    )
    # Before the first batch nobody knows how many rows one has.
    wanted = "rows[{}] of step {} are {}, and a batch has 8; name each row of it, in their order"
    assert refusal(loop, 1, [rows[:4]], batch) == wanted.format(0, 1, 4)
    assert refusal(loop, 2, [rows, rows[:7]]) == wanted.format(1, 2, 7)
    assert refusal(loop, 2, [rows], batch, other) == (
        "step 2 runs 2 batches, and its rows are those of 1; name the rows of each: "
        "freezer.step(t, rows=[[Row(number, token_digest(tokens)), ...], ...])"
    )
    assert refusal(loop, 3, [rows, loop.data.rows(other)], batch).startswith(
        "step 3 runs 1 batches, and its rows are those of 2; name the rows of each: "
    )
    assert refusal(plain, 1, [rows]) == (
        "step 1 names rows, and cache is None; leave them out, or hand over cache=ActivationCache()"
    )
    loop.freezer.close()


@pytest.mark.parametrize(
    "row", [7, (3, "a"), Row(-1, "a"), Row(1.0, "a"), Row(1, 5)],  # type: ignore[arg-type]
)  # fmt: skip
def test_what_is_no_row_is_refused(row: Any) -> None:
    loop = Loop(MEMORY)
    told = re.escape(f"rows[0][1] is {row!r}; it must be a Row with a number of 0 or more")
    with pytest.raises(ValueError, match=told), loop.freezer.step(1, [[Row(1, "a"), row]]):
        pytest.fail("it began")
    loop.freezer.close()


def test_a_number_may_come_from_a_tensor() -> None:
    loop = Loop(MEMORY, SINGLE[1], last_warmup_step=0)
    numbers = torch.arange(BATCH)
    for t in range(1, N_COMPUTED + 2):
        with loop.freezer.step(t, [[Row(n, "") for n in numbers]]):  # type: ignore[arg-type]
            loop.batch(range(BATCH))
        loop.optimizer.zero_grad()
        loop.flush()
    use = loop.freezer.report().cache
    assert use is not None
    assert use.entered == 1
    loop.freezer.close()
