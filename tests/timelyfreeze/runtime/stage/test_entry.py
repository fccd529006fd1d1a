"""A batch that begins behind a frozen front learns what one that ran through it learns."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.timelyfreeze.helpers.layered import make_parts
from tests.timelyfreeze.helpers.stages import (
    FULL,
    LOOPED,
    N_MICROBATCHES,
    SINGLE,
    SPLIT,
    VOCABULARY,
    WIDTH,
    Block,
    Head,
    Pipeline,
    make_batch,
    shard,
)
from timelyfreeze.runtime import BatchEntry, BlockPlace, forward_only
from timelyfreeze.runtime.shards import local_part

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]

SCHEDULES = [FULL, SPLIT, LOOPED]


class Part(nn.Module):
    """A stage of two blocks, cut out of a model as TorchTitan does it."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        self.layers = nn.ModuleDict({str(2 * stage + i): Block() for i in range(2)})
        self.head = Head() if stage == 3 else None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden if self.head is None else self.head(hidden)


@pytest.fixture(params=SCHEDULES, ids=lambda schedule: schedule.__name__)
def pipeline(request: pytest.FixtureRequest) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline([Part(stage) for stage in range(4)], request.param)


def step(pipeline: Pipeline, entry: BatchEntry | None, depth: int) -> list[Tensor | None]:
    """Run a batch with the first ``depth`` blocks frozen; return losses, then gradients."""
    for module in pipeline.modules:
        module.zero_grad(set_to_none=True)
    for stage in pipeline.stages:
        is_frozen = [is_in_front(name, depth) for name in stage.parameter_names]
        masks = dict.fromkeys(range(N_MICROBATCHES), np.array(is_frozen))
        is_cut = stage.stage_index <= depth // 2
        cut = range(N_MICROBATCHES) if is_cut else ()
        stage.freeze(masks if any(is_frozen) else {}, without_input_grads=cut)
        if entry is not None:
            stage.enter(entry)
    tokens, labels = make_batch()
    losses: list[Tensor] = []
    with pipeline.recorder.recorded_batch():
        pipeline.schedule.step(tokens, target=labels, losses=losses)
    for stage in pipeline.stages:
        stage.freeze_nothing()
    return [*losses, *(p.grad for module in pipeline.modules for p in module.parameters())]


def is_in_front(name: str, depth: int) -> bool:
    first, _, rest = name.partition(".")
    return first == "tok_embeddings" or (first == "layers" and int(rest.split(".")[0]) < depth)


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@pytest.mark.parametrize("depth", [1, 2, 5, 6, 8])
def test_losses_and_gradients_are_the_same_to_the_last_bit(pipeline: Pipeline, depth: int) -> None:
    stage, n_blocks = (depth // 2, depth % 2) if depth < 8 else (3, 2)
    kept: dict[int, Tensor] = {}
    place = BlockPlace(stage, n_blocks)
    tapped = BatchEntry(tapped=place, tap=lambda m, t: kept.update({m: t.detach().clone()}))
    plain = step(pipeline, None, depth)
    assert all(map(equal, plain, step(pipeline, tapped, depth)))
    assert sorted(kept) == list(range(N_MICROBATCHES))
    ran = Counter[str]()
    for module in pipeline.modules:
        for name, block in [*module.layers.items(), ("embedding", module.tok_embeddings)]:
            if block is not None:
                block.register_forward_pre_hook(lambda *_, name=name: ran.update([name]))
    entered = BatchEntry(place, kept)
    found = step(pipeline, entered, depth)
    assert all(map(equal, plain, found))
    assert any(gradient is not None for gradient in found[N_MICROBATCHES:])
    assert ran == {str(block): N_MICROBATCHES for block in range(depth, 8)}
    # What was kept is not written to, and the next batch begins at the front again.
    again = step(pipeline, None, depth)
    assert all(map(equal, plain, again))
    assert ran["embedding"] == N_MICROBATCHES


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 4), (3, 5), (2, 6), (4, 8)])
def test_a_batch_may_begin_within_the_front_and_be_listened_to_behind_it(
    pipeline: Pipeline, first: int, second: int
) -> None:
    """What was kept of a shallower front is carried on to a deeper one."""
    places = {depth: BlockPlace(depth // 2, depth % 2) for depth in (first, second)}
    places[8] = BlockPlace(3, 2)
    kept: dict[int, dict[int, Tensor]] = {first: {}, second: {}}

    def told(depth: int) -> Callable[[int, Tensor], None]:
        return lambda m, t: kept[depth].update({m: t.detach().clone()})

    step(pipeline, BatchEntry(tapped=places[first], tap=told(first)), first)
    plain = step(pipeline, BatchEntry(tapped=places[second], tap=told(second)), second)
    directly = kept[second]
    kept[second] = {}
    entry = BatchEntry(places[first], kept[first], places[second], told(second))
    assert all(map(equal, plain, step(pipeline, entry, second)))
    assert all(torch.equal(kept[second][m], directly[m]) for m in range(N_MICROBATCHES))


def test_an_input_is_waited_for_before_its_forward_is_timed(pipeline: Pipeline) -> None:
    asked: list[int] = []

    class Inputs(dict[int, Tensor]):
        def __missing__(self, microbatch: int) -> Tensor:
            asked.append(microbatch)
            return torch.empty(0)

    step(pipeline, None, 0)
    for stage in pipeline.stages:
        stage.enter(BatchEntry(BlockPlace(2, 0), Inputs()))
        is_in_front = stage.stage_index <= 2
        assert (stage.get_fwd_recv_ops(1) == []) == is_in_front
        assert asked == ([1] if stage.stage_index >= 2 else [])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("schedule", SINGLE)
@pytest.mark.parametrize("depth", [1, 2])
def test_under_fsdp_blocks_that_are_left_out_stay_sharded(
    schedule: type, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = Part(0)
    module.layers["2"], module.head = Block(), Head()
    shard([module])
    pipeline = Pipeline([module], schedule)
    kept: dict[int, Tensor] = {}
    place = BlockPlace(0, depth)
    tapped = BatchEntry(tapped=place, tap=lambda m, t: kept.update({m: t.detach().clone()}))
    plain = [local_part(t) if t is not None else t for t in step(pipeline, tapped, depth)]
    gathered = Counter[str]()
    unshard = FSDPModule.unshard
    names = {block: name for name, block in module.layers.items()}

    def counted(self: FSDPModule) -> None:
        gathered.update([names.get(self, "other")])
        unshard(self)

    monkeypatch.setattr(FSDPModule, "unshard", counted)
    found = step(pipeline, BatchEntry(place, kept), depth)
    assert all(map(equal, plain, [local_part(t) if t is not None else t for t in found]))
    assert any(gradient is not None for gradient in found[N_MICROBATCHES:])
    assert set(gathered) == {*map(str, range(depth, 3)), "other"}


def test_what_a_passed_stage_froze_still_counts(pipeline: Pipeline) -> None:
    kept: dict[int, Tensor] = {}
    place = BlockPlace(2, 0)
    tap = BatchEntry(tapped=place, tap=lambda m, t: kept.update({m: t.detach().clone()}))
    step(pipeline, tap, 4)
    (computed,) = pipeline.recorder.drain()
    step(pipeline, BatchEntry(place, kept), 4)
    (entered,) = pipeline.recorder.drain()
    assert entered.durations_ms.keys() == computed.durations_ms.keys()
    ratios = [set(stage.applied_ratios.values()) for stage in pipeline.stages]
    assert ratios == [{1.0}, {1.0}, {0.0}, {0.0}]


def test_evaluation_begins_at_the_front(pipeline: Pipeline) -> None:
    tokens, labels = make_batch()
    step(pipeline, None, 4)
    with forward_only(pipeline.schedule):
        outputs = pipeline.schedule.eval(tokens, target=labels, losses=[])
        for stage in pipeline.stages:
            stage.enter(BatchEntry(BlockPlace(2, 0)))
        again = pipeline.schedule.eval(tokens, target=labels, losses=[])
    assert torch.equal(again, outputs)


def test_a_model_without_blocks_is_refused() -> None:
    from tests.timelyfreeze.helpers.stages import make_modules

    pipeline = Pipeline(make_modules(), LOOPED)
    with pytest.raises(ValueError, match=r"'layers'; Sequential has none"):
        pipeline.stages[0].enter(BatchEntry(BlockPlace(1, 0)))


def test_blocks_and_embedding_may_have_other_names() -> None:
    pipeline = Pipeline(make_parts(), LOOPED)
    first, second = pipeline.stages[:2]
    with pytest.raises(ValueError, match="first stage whose embedding is 'tok_embeddings'; Part"):
        first.find_blocks()
    assert first.find_blocks("layers", "embedding").embedding is first.submod.embedding
    assert second.find_blocks("layers", "embedding").embedding is None
    with pytest.raises(ValueError, match=r"an nn\.ModuleDict 'blocks'; Part has none"):
        second.find_blocks("blocks")


def test_a_stage_knows_how_many_rows_a_microbatch_has() -> None:
    pipeline = Pipeline([Part(stage) for stage in range(4)], LOOPED)
    assert {stage.n_rows for stage in pipeline.stages} == {None}
    pipeline.run()
    assert {stage.n_rows for stage in pipeline.stages} == {2}
