"""The profile of a tiny model on this machine: what runs, never how fast."""

import gc
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.torchtitan.helpers.debug_model import N_LAYERS, config
from timelyfreeze.runtime.linear import StageLinears
from timelyfreeze.runtime.recorder import HostClock, LoneHostClock
from timelyfreeze.runtime.stage import FreezingStage
from timelyfreeze.schedule.order import ActionKind
from torchtitan.freezing.profile.bench import (
    LoneStage,
    Repeats,
    Response,
    profile_clock,
)
from torchtitan.freezing.profile.profile import Profile, profile_stages
from torchtitan.settings.layout import pipeline_order, stage_modules

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("installed")]

F, B, I, W = ActionKind  # noqa: E741
REPEATS = Repeats(ratios=(0.0, 0.5, 1.0), cold=1, kept=3)


# Of what is in memory at a time: stages, kinds of device, parameters.
InMemory = list[tuple[int, set[str], int]]


@pytest.fixture(scope="module")
def measured() -> tuple[Profile, InMemory]:
    """The debug model in 3 stages, measured once, and what was in memory after each stage.

    What was there before is not looked through each time.
    """
    alive: InMemory = []

    def count(response: Response) -> None:
        gc.collect()
        stages = [o for o in gc.get_objects() if type(o) is FreezingStage]
        weights = [p for s in stages for p in s.submod.parameters()]
        alive.append(
            (len(stages), {p.device.type for p in weights}, sum(map(torch.numel, weights)))
        )

    gc.freeze()
    try:
        return profile_stages(config(), REPEATS, count), alive
    finally:
        gc.unfreeze()


@pytest.fixture
def profile(measured: tuple[Profile, InMemory]) -> Profile:
    return measured[0]


# -- one stage -------------------------------------------------------------------------------------


class Seen(nn.Module):
    """A stage of two weights that notes what it gets."""

    def __init__(self, is_first: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4) if is_first else None
        self.up = nn.Linear(4, 4, bias=False)
        self.down = nn.Linear(4, 4, bias=False)
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append((x.shape, x.dtype))
        if self.embedding is not None:
            x = self.embedding(x)
        return self.down(torch.tanh(self.up(x)))


def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")


def lone(
    module: Seen, *, is_first: bool = False, is_last: bool = False, gradient_rank: int = 0
) -> LoneStage:
    tokens = torch.randint(4, (3, 5))
    return LoneStage(
        module,
        tokens,
        tokens,
        torch.empty(3, 5, 4),
        cross_entropy,
        is_first=is_first,
        is_last=is_last,
        gradient_rank=gradient_rank,
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("split", [False, True])
def test_what_frozen_weights_still_learn_is_part_of_their_time(
    monkeypatch: pytest.MonkeyPatch, split: bool
) -> None:
    done: list[str] = []
    monkeypatch.setattr(
        StageLinears, "add", lambda self, group, columns, dy, kept: done.append(group.name)
    )
    stage = lone(Seen(), gradient_rank=1)
    stage.run(np.ones(2, dtype=np.bool_), split=split)
    assert sorted(done) == sorted(stage.table.names)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("is_first", "is_last"), [(True, False), (False, False), (False, True)])
def test_a_stage_runs_alone_with_masks(is_first: bool, is_last: bool, split: bool) -> None:
    module = Seen(is_first)
    stage = lone(module, is_first=is_first, is_last=is_last)
    names = stage.table.names
    down = names.index("down.weight")
    mask = np.arange(len(names)) == down
    fraction = stage.run(mask, split=split)
    assert fraction == pytest.approx(16 / stage.table.total)
    # Only what the mask names has no gradient.
    assert {n for n, p in module.named_parameters() if p.grad is None} == {"down.weight"}
    assert stage.run(np.zeros(len(names), dtype=np.bool_), split=split) == 0.0
    assert module.down.weight.grad is not None
    shape = (
        (torch.Size([3, 5]), torch.int64) if is_first else (torch.Size([3, 5, 4]), torch.float32)
    )
    assert set(module.shapes) == {shape}
    times = stage.take_times()
    assert len(times) == 2
    for by_kind in times:
        assert set(by_kind) == ({F, I, W} if split else {F, B})


@pytest.mark.usefixtures("one_rank")
def test_gradients_are_those_of_the_stage_by_itself() -> None:
    module = Seen()
    stage = lone(module, is_last=True)
    stage.run(np.zeros(2, dtype=np.bool_), split=False)
    (front,) = [s.submod for s in stage._stages if s is not stage.stage]
    labels = stage._labels
    loss = cross_entropy(module(front.noise), labels) / labels.numel()
    wanted = torch.autograd.grad(loss, list(module.parameters()))
    for parameter, gradient in zip(module.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.usefixtures("one_rank")
def test_gradients_add_up_over_passes() -> None:
    module = Seen()
    stage = lone(module)
    none = np.zeros(2, dtype=np.bool_)
    stage.run(none, split=False)
    once = module.up.weight.grad.clone()
    stage.run(none, split=True)
    torch.testing.assert_close(module.up.weight.grad, 2 * once)


@pytest.mark.usefixtures("one_rank")
def test_a_first_stage_both_ways() -> None:
    module = Seen(is_first=True)
    stage = lone(module, is_first=True)
    everything = np.ones(3, dtype=np.bool_)
    ran: list[str] = []
    module.down.register_full_backward_pre_hook(lambda *args: ran.append("down"))
    stage.run(everything, split=False)
    assert ran == [], "frozen whole it has no backward"
    stage.attach(per_tensor=True)
    stage.run(everything, split=False)
    assert ran == ["down"], "the chain of input gradients runs to the embedding"
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="events are the clock of a GPU")
def test_processor_time_is_measured_where_a_rank_has_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert isinstance(profile_clock(torch.device("cpu")), LoneHostClock)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert isinstance(profile_clock(torch.device("cpu")), HostClock)


def test_the_processor_clock_does_not_run_while_the_process_sleeps() -> None:
    clock = LoneHostClock()
    start, began = clock.mark(), time.perf_counter()
    time.sleep(0.05)
    asleep_ms = clock.work_ms(start, clock.mark())
    assert asleep_ms < 0.5 * 1e3 * (time.perf_counter() - began)
    while clock.work_ms(start, clock.mark()) < 5.0:
        sum(range(1000))
    assert clock.elapsed_ms(start, clock.mark()) >= 5.0


# -- all stages ------------------------------------------------------------------------------------


def test_every_stage_is_measured_and_the_first_one_both_ways(profile: Profile) -> None:
    assert [(r.stage, r.first_stage) for r in profile.responses] == [
        (0, "all_or_nothing"), (0, "per_tensor"), (1, None), (2, None),
    ]  # fmt: skip
    modules = stage_modules(config(), N_LAYERS)
    layers = tuple(sum(name.startswith("layers.") for name in names) for names in modules)
    assert sum(layers) == profile.n_layers == N_LAYERS
    assert profile.order == pipeline_order(config(), N_LAYERS)
    assert [r.n_layers for r in profile.probes] == [1, layers[1]]
    assert len(profile.peak_bytes) == 3


def test_every_ratio_is_measured_as_often_as_asked(profile: Profile) -> None:
    for response in [*profile.responses, *profile.probes]:
        ratios = (0.0, 1.0) if response.first_stage == "all_or_nothing" else REPEATS.ratios
        assert set(response.curves) == {B, W}
        for points in response.curves.values():
            assert tuple(p.ratio for p in points) == ratios
            assert {len(p.times_ms) for p in points} == {len(p.fractions) for p in points} == {3}
        assert len(response.forward_ms) == 2 * 3 * len(ratios)
        assert len(response.input_ms) == 3 * len(ratios)
        every = [*response.forward_ms, *response.input_ms]
        every += [t for points in response.curves.values() for p in points for t in p.times_ms]
        assert all(0.0 <= time_ms < 1e6 for time_ms in every)


def test_masks_hit_their_ratios(profile: Profile) -> None:
    for response in [*profile.responses, *profile.probes]:
        for points in response.curves.values():
            for point in points:
                if point.ratio in (0.0, 1.0):
                    assert set(point.fractions) == {point.ratio}
                else:
                    # A share misses its ratio by less than one tensor of each size.
                    assert all(abs(fraction - point.ratio) < 0.25 for fraction in point.fractions)
                    assert abs(point.fraction - point.ratio) < 0.15
                    assert 0.0 < min(point.fractions) <= max(point.fractions) < 1.0


def test_one_stage_is_in_memory_at_a_time(measured: tuple[Profile, InMemory]) -> None:
    found, alive = measured
    assert {n for n, _, _ in alive} == {1}
    assert {tuple(devices) for _, devices, _ in alive} == {("cpu",)}
    sizes = [size for _, _, size in alive]
    assert sizes[0] == sizes[1], "the first stage is built once"
    assert len(sizes) == len(found.responses) + 1, "one stage more for the overhead of a layer"


def test_stages_are_cut_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.llama3 import Transformer, llama3_args

    from torchtitan.freezing.profile import bench as profile_bench

    names: list[str] = []
    dtypes = set()

    class Noting(LoneStage):
        def __init__(self, module: nn.Module, *batch: Any, **kw: Any) -> None:
            super().__init__(module, *batch, **kw)
            tokens, _, hidden, _ = batch
            names.extend(self.table.names)
            dtypes.add(hidden.dtype)
            assert tokens.shape == (2, 16)
            first = module.tok_embeddings is not None
            out = module(tokens if first else hidden)
            if module.output is None:
                assert out.dtype == hidden.dtype, "stages send what the profile sends"
                assert out.shape == hidden.shape

    monkeypatch.setattr(profile_bench, "LoneStage", Noting)
    once = Repeats(ratios=(0.0, 1.0), cold=0, kept=1)
    profile_stages(config(training__mixed_precision_param="bfloat16"), once, lambda r: None)
    with torch.device("meta"):
        whole = Transformer(llama3_args["debugmodel"])
    n_probe = len(names) - len(list(whole.parameters()))
    assert sorted(names[:-n_probe]) == sorted(n for n, _ in whole.named_parameters())
    assert dtypes == {torch.bfloat16}


def test_recomputed_layers_have_no_split_backward() -> None:
    once = Repeats(ratios=(0.0, 1.0), cold=0, kept=1)
    found = profile_stages(config(activation_checkpoint__mode="full"), once, lambda r: None)
    assert all(set(r.curves) == {B} and r.input_ms == () for r in found.responses)
    with pytest.raises(ValueError, match=r"activation_checkpoint.mode is .full.* must be .none."):
        profile_stages(
            config(
                activation_checkpoint__mode="full",
                parallelism__pipeline_parallel_schedule="ZBVZeroBubble",
                parallelism__pipeline_parallel_degree=2,
            ),
            once,
            lambda r: None,
        )
