"""Metrics of a change, against definitions applied to one element after the other in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.changes import DECAY, EVERY, THRESHOLD, assert_close, oracle
from timelyfreeze.policies.policy import Measurement, Metric, Source
from timelyfreeze.runtime.meters.change_meter import ChangeMeter

SHAPES = ((3, 4), (5,), (1,), (2, 3, 2), (4,))
ONE = np.ones(1)  # of one parameter, reached by every backward
FROZEN = 4  # the tensor that never has a gradient and never moves


class Walk:
    """Tensors that move at random, with gradients of their own; what is to be measured in float64.

    A third of the gradients is missing, and moves have nothing to do with gradients, so that no
    source passes for another.
    """

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.named = [
            (f"layers.{i}.w", nn.Parameter(self.noise(shape).to(dtype)))
            for i, shape in enumerate(SHAPES)
        ]
        self.parameters = [parameter for _, parameter in self.named]
        self.begin()

    def noise(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator)

    def begin(self) -> None:
        self.start = [p.detach().double() for p in self.parameters]
        self.sums = [torch.zeros(p.shape, dtype=torch.float64) for p in self.parameters]

    def step(self) -> None:
        for i, p in enumerate(self.parameters):
            missing = float(torch.rand((), generator=self.generator)) < 1 / 3
            gradient, move = self.noise(p.shape), self.noise(p.shape)
            p.grad = None if missing or i == FROZEN else gradient.to(p.dtype)
            if i != FROZEN:
                with torch.no_grad():
                    p.add_(0.1 * move.to(p.dtype))
            if p.grad is not None:
                self.sums[i] += p.grad.double()

    def take(self, source: Source) -> list[Tensor]:
        """The change since ``begin`` or the last ``take``."""
        if source is Source.UPDATES:
            pairs = zip(self.parameters, self.start, strict=True)
            changes = [p.detach().double() - start for p, start in pairs]
        elif source is Source.GRADIENTS:
            changes = self.sums
        else:
            gradients = [p.grad for p in self.parameters]
            zeros = torch.zeros_like
            changes = [
                zeros(p) if g is None else g
                for g, p in zip(gradients, self.parameters, strict=True)
            ]
        self.begin()
        return changes


def interval(walk: Walk, meter: ChangeMeter, n_steps: int) -> None:
    for _ in range(n_steps):
        walk.step()
        meter.add_step(np.ones(len(SHAPES)))


def parameter_of(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


# --- the metrics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("metrics", [EVERY, EVERY[::-1], *((metric,) for metric in EVERY)])
@pytest.mark.parametrize("source", Source)
def test_metrics_are_those_of_an_element_wise_computation(
    source: Source, metrics: tuple[Metric, ...], on_host: bool
) -> None:
    walk = Walk()
    meter = ChangeMeter(walk.named, Measurement(source, metrics, DECAY, THRESHOLD), on_host=on_host)
    # Of what was before the beginning, nothing may be left.
    interval(walk, meter, 2)
    meter.take()
    interval(walk, meter, 1)
    walk.begin()
    meter.begin()
    measured, changes = [], []
    for n_steps in (3, 1, 4, 2):
        interval(walk, meter, n_steps)
        measured.append(meter.take())
        changes.append(walk.take(source))
    settles = Metric.SETTLED in metrics
    for got, wanted in zip(measured, oracle(changes, settles=settles), strict=True):
        assert tuple(got) == metrics
        assert_close(got, wanted)
        assert all(
            numbers[FROZEN] == (4.0 if metric is Metric.SETTLED else 0.0)
            for metric, numbers in got.items()
        )
        assert all(any(numbers) for numbers in got.values())


# At three checks: the changes of two elements, and the metrics of them.
BY_HAND = {
    (1.0, -2.0): {
        Metric.SQUARE_SUM: 5.0,
        Metric.ABS_SUM: 3.0,
        Metric.SUM: -1.0,
        Metric.MEAN_ABS_SUM: 1.5,
        Metric.SETTLED: 0.0,  # |E| is all of the mean of |Delta|
        Metric.DIFFERENCE_SQUARE_SUM: 5.0,
    },
    (-1.0, 0.0): {
        Metric.SQUARE_SUM: 1.0,
        Metric.ABS_SUM: 1.0,
        Metric.SUM: -1.0,
        Metric.MEAN_ABS_SUM: 0.75,  # E = (-1/4, -1/2)
        Metric.SETTLED: 1.0,  # 1/4 of 3/4 and 1/2 of 1/2, under a threshold of 0.6
        Metric.DIFFERENCE_SQUARE_SUM: 8.0,
    },
    (0.0, 0.0): {
        Metric.SQUARE_SUM: 0.0,
        Metric.ABS_SUM: 0.0,
        Metric.SUM: 0.0,
        Metric.MEAN_ABS_SUM: 0.5,  # the first element stays at E = -1/4, the second halves
        Metric.SETTLED: 1.0,
        Metric.DIFFERENCE_SQUARE_SUM: 1.0,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", Source)
def test_metrics_by_hand(source: Source, dtype: torch.dtype) -> None:
    # Numbers that bfloat16 has.
    parameter = parameter_of(3.0, -1.0)
    meter = ChangeMeter([("w", parameter)], Measurement(source, EVERY, 0.5, 0.6), dtype=dtype)
    meter.begin()
    for change, metrics in BY_HAND.items():
        whole = torch.tensor(change)
        # In two steps, of which the second does it all where only the last one counts.
        first, second = (0.5, 0.5) if source is not Source.LAST_GRADIENT else (7.0, 1.0)
        for fraction in (first, second):
            parameter.grad = fraction * whole
            with torch.no_grad():
                parameter.add_(0.5 * whole)
            meter.add_step(ONE)
        got = {metric: number for metric, (number,) in meter.take().items()}
        assert got == pytest.approx(metrics, rel=1e-6)


@pytest.mark.parametrize(
    ("source", "wanted"), [(Source.GRADIENTS, [2.0]), (Source.LAST_GRADIENT, [None])]
)
def test_a_missing_gradient_adds_nothing_and_is_not_known(
    source: Source, wanted: list[float | None]
) -> None:
    parameter = parameter_of(1.0)
    meter = ChangeMeter([("w", parameter)], Measurement(source, (Metric.ABS_SUM,)))
    meter.begin()
    for gradient in (2.0, None):  # frozen in the step that ends the interval
        parameter.grad = None if gradient is None else torch.tensor([gradient])
        meter.add_step(np.array([0.0 if gradient is None else 1.0]))
    assert meter.take() == {Metric.ABS_SUM: wanted}


@pytest.mark.parametrize(("source", "wanted"), [(Source.GRADIENTS, 15), (Source.LAST_GRADIENT, 8)])
def test_masks_that_leave_out_a_part_do_not_make_gradients_smaller(
    source: Source, wanted: float
) -> None:
    """Eight microbatches that agree: what is left of a gradient, times all over those left."""
    parameter = parameter_of(1.0)
    meter = ChangeMeter([("w", parameter)], Measurement(source, (Metric.ABS_SUM,)))
    meter.begin()
    for whole, n_reached in ((7.0, 3), (8.0, 1)):
        parameter.grad = torch.tensor([whole * n_reached / 8])
        meter.add_step(np.array([n_reached / 8]))
    assert meter.take() == {Metric.ABS_SUM: [pytest.approx(wanted)]}


# --- bfloat16 -------------------------------------------------------------------------------------


def test_updates_of_bfloat16_weights_are_exact_in_bfloat16() -> None:
    walk = Walk(dtype=torch.bfloat16)
    metrics = (Metric.SQUARE_SUM, Metric.ABS_SUM)
    meter = ChangeMeter(walk.named, Measurement(Source.UPDATES, metrics), dtype=torch.bfloat16)
    meter.begin()
    changes = []
    for n_steps in (2, 1, 3):
        interval(walk, meter, n_steps)
        changes.append(walk.take(Source.UPDATES))
        assert_close(meter.take(), oracle(changes)[-1])


def test_small_moves_of_float32_weights_count_in_bfloat16_once_they_add_up() -> None:
    # From 1 to 2 bfloat16 has steps of 1/128. A move of 3/8 of one is too small to be seen.
    step = 1 / 128
    meters = {}
    for dtype in (torch.bfloat16, torch.float32):
        parameter = parameter_of(1.0)
        measurement = Measurement(Source.UPDATES, (Metric.ABS_SUM,))
        meter = ChangeMeter([("w", parameter)], measurement, dtype=dtype)
        meter.begin()
        meters[dtype] = []
        for _ in range(3):
            with torch.no_grad():
                parameter.add_(3 / 8 * step)
            meters[dtype] += meter.take()[Metric.ABS_SUM]
    # The weight is at 3/8, 6/8 and 9/8 of a step, which rounds to 0, 1 and 1.
    assert meters[torch.bfloat16] == [0.0, step, 0.0]
    assert meters[torch.float32] == [3 / 8 * step] * 3


# --- memory and checkpoints -----------------------------------------------------------------------

MEAN, DIFFERENCE = Metric.MEAN_ABS_SUM, Metric.DIFFERENCE_SQUARE_SUM
KINDS = [
    (Source.UPDATES, (Metric.ABS_SUM, Metric.SQUARE_SUM), ["weights"]),
    (Source.UPDATES, (Metric.ABS_SUM, MEAN), ["weights", "mean"]),
    (Source.UPDATES, (Metric.SETTLED,), ["weights", "mean", "mean_abs"]),
    (Source.UPDATES, EVERY, ["weights", "mean", "mean_abs", "previous"]),
    (Source.GRADIENTS, (Metric.SQUARE_SUM,), ["sum"]),
    (Source.GRADIENTS, (DIFFERENCE,), ["sum", "previous"]),
    (Source.LAST_GRADIENT, (Metric.SQUARE_SUM,), []),
    (Source.LAST_GRADIENT, (MEAN, DIFFERENCE), ["mean", "previous"]),
]


@pytest.mark.parametrize(("dtype", "n_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize(("source", "metrics", "kinds"), KINDS)
def test_only_the_vectors_that_are_needed_are_kept_and_always_the_same(
    source: Source,
    metrics: tuple[Metric, ...],
    kinds: list[str],
    dtype: torch.dtype,
    n_bytes: int,
) -> None:
    walk = Walk()
    meter = ChangeMeter(walk.named, Measurement(source, metrics), dtype=dtype)
    assert meter.n_bytes == len(kinds) * (12 + 5 + 1 + 12 + 4) * n_bytes
    keys = {f"{kind}.{name}" for kind in kinds for name, _ in walk.named}

    def kept() -> tuple[set[str], set[torch.dtype]]:
        state = meter.state_dict()
        return set(state), {tensor.dtype for tensor in state.values()}

    dtypes = {dtype} if kinds else set()
    assert kept() == (keys, dtypes)
    meter.begin()
    assert kept() == (keys, dtypes)
    interval(walk, meter, 2)
    assert kept() == (keys, dtypes)
    meter.take()
    assert kept() == (keys, dtypes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("source", "metrics", "kinds"), KINDS)
def test_a_restored_meter_goes_on_as_if_nothing_had_happened(
    source: Source, metrics: tuple[Metric, ...], kinds: list[str], dtype: torch.dtype
) -> None:
    measurement = Measurement(source, metrics, DECAY, THRESHOLD)
    walk = Walk()
    meter = ChangeMeter(walk.named, measurement, dtype=dtype)
    meter.begin()
    for n_steps in (2, 3):
        interval(walk, meter, n_steps)
        meter.take()
    interval(walk, meter, 1)  # saved amid an interval
    saved = {key: tensor.clone() for key, tensor in meter.state_dict().items()}

    again = Walk()  # moves as the other did
    for _ in range(6):
        again.step()
    restored = ChangeMeter(again.named, measurement, dtype=dtype)
    handed_over = {key: tensor.clone() for key, tensor in saved.items()}
    restored.load_state_dict(handed_over)
    for n_steps in (2, 1):
        interval(walk, meter, n_steps)
        interval(again, restored, n_steps)
        assert restored.take() == meter.take()
    # What was loaded was copied.
    assert all(torch.equal(handed_over[key], saved[key]) for key in saved)


def test_elements_that_have_settled_stay_and_the_share_grows() -> None:
    """Under updates of pure noise, simulated element by element: 34% in 24 checks, 83% in 80."""
    n, threshold, decay = 40_000, 0.01, 0.9
    parameter = nn.Parameter(torch.zeros(n, dtype=torch.float64))
    measurement = Measurement(Source.UPDATES, (Metric.SETTLED,), decay, threshold)
    meter = ChangeMeter([("w", parameter)], measurement)
    meter.begin()
    draws = np.random.default_rng(0)
    mean, mean_abs = np.zeros(n), np.zeros(n)
    settled = np.zeros(n, dtype=bool)
    shares = {}
    for number in range(1, 81):
        update = draws.standard_normal(n)
        mean = np.where(settled, mean, decay * mean + (1 - decay) * update)
        mean_abs = np.where(settled, mean_abs, decay * mean_abs + (1 - decay) * abs(update))
        settled |= abs(mean) <= threshold * mean_abs
        with torch.no_grad():
            parameter += torch.from_numpy(update)
        (measured,) = meter.take()[Metric.SETTLED]
        shares[number] = measured / n
        # Weights are kept in float32, so that few elements lie on the other side of the threshold.
        assert measured == pytest.approx(settled.sum(), abs=3 + 0.002 * n)
    assert (shares[24], shares[80]) == pytest.approx((0.34, 0.83), abs=0.015)
