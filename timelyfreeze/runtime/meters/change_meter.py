"""Measures changes of a rank's tensors, for policies judging by them.

Depending on the source of change and the metrics, vectors as large as the model are kept: the
weights at the last check, or the sum of gradients since; the running mean E_K, and that of absolute
changes; the change of the interval before. They live on the device or on the host, in float32 or
bfloat16.

A tensor reached by n of a step's M backwards has about n / M of its gradient, so gradients count M
/ n times: otherwise often frozen tensors would seem to have smaller gradients, and be frozen first.

bfloat16 has 8 bits of precision. Kept weights are rounded, so a weight counts as still until its
next step in this type, unless the weights are bfloat16 themselves. A sum of agreeing gradients
stops growing after about 256 steps, and a running mean loses additions below some thousandths. So
bfloat16 suits short intervals and decays not close to 1.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from timelyfreeze.policies import Measurement, Metric, Source
from timelyfreeze.runtime.shards import as_sharded, local_gradient, local_part, sum_over_shards


def kept_vectors(measurement: Measurement) -> list[str]:
    """Return the kinds of vectors needed by a measurement, as large as the model."""
    is_kept = {
        "weights": measurement.source is Source.UPDATES,
        "sum": measurement.source is Source.GRADIENTS,
        "mean": not {Metric.MEAN_ABS_SUM, Metric.SETTLED}.isdisjoint(measurement.metrics),
        "mean_abs": Metric.SETTLED in measurement.metrics,
        "previous": Metric.DIFFERENCE_SQUARE_SUM in measurement.metrics,
    }
    return [kind for kind, kept in is_kept.items() if kept]


class ChangeMeter:
    """Keeps the vectors of a measurement and takes metrics at checks."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        measurement: Measurement,
        *,
        on_host: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._measurement = measurement
        kinds = kept_vectors(measurement)
        self._vectors = {k: [_zeros(p, on_host, dtype) for p in self._parameters] for k in kinds}
        self._frequency = np.ones(len(self._parameters))

    @property
    def n_bytes(self) -> int:
        """Memory of the vectors on this rank."""
        return sum(vector.nbytes for kept in self._vectors.values() for vector in kept)

    def begin(self) -> None:
        """Begin the first interval at the weights of now."""
        for kind in self._vectors:
            for vector, parameter in zip(self._vectors[kind], self._parameters, strict=True):
                vector.zero_()
                if kind == "weights":
                    vector.copy_(local_part(parameter))
                elif kind == "mean" and "mean_abs" in self._vectors:
                    vector.fill_(torch.nan)  # no mean yet, of which nothing can have settled

    def add_step(self, frequency: NDArray[np.float64]) -> None:
        """Note a step's gradients, each reached by a fraction of its backwards."""
        self._frequency = frequency
        if self._measurement.source is Source.GRADIENTS:
            for i, total in enumerate(self._vectors["sum"]):
                gradient = self._gradient(i)
                if gradient is not None:
                    total.add_(gradient.to(device=total.device, dtype=total.dtype))

    def take(self) -> dict[Metric, list[float | None]]:
        """Take the metrics of the ended interval and begin the next.

        A metric has a number per parameter, over all of a sharded tensor; None for the last
        gradient of parameters without a backward in the step.
        """
        rows = [self._take_one(i) for i in range(len(self._parameters))]
        columns = torch.stack([torch.stack(row) for row in rows])
        sum_over_shards(self._parameters, columns)
        numbers = columns.double().cpu().T.tolist()
        if self._measurement.source is Source.LAST_GRADIENT:
            is_known = (self._frequency > 0.0).tolist()
            numbers = [
                [n if known else None for n, known in zip(row, is_known, strict=True)]
                for row in numbers
            ]
        return dict(zip(self._measurement.metrics, numbers, strict=True))

    def _gradient(self, i: int) -> Tensor | None:
        """Return the local part of a gradient, scaled up for masks; None without."""
        frequency = float(self._frequency[i])
        if self._parameters[i].grad is None or frequency == 0.0:
            return None
        gradient = local_gradient(self._parameters[i])
        return gradient if frequency == 1.0 else gradient / frequency

    def _take_one(self, i: int) -> list[Tensor]:
        """Return the wanted metrics of the local part of parameter ``i``."""
        vectors = {kind: kept[i] for kind, kept in self._vectors.items()}
        change = self._change(i, vectors)
        means = self._next_means(vectors, change)
        norm, threshold = torch.linalg.vector_norm, self._measurement.threshold
        ways: dict[Metric, Callable[[], Tensor]] = {
            Metric.SQUARE_SUM: lambda: norm(change) ** 2,
            Metric.SUM: change.sum,
            Metric.ABS_SUM: lambda: norm(change, 1),
            Metric.MEAN_ABS_SUM: lambda: norm(means["mean"], 1),
            Metric.SETTLED: lambda: (
                (means["mean"].abs() <= threshold * means["mean_abs"]).sum().float()
            ),
            Metric.DIFFERENCE_SQUARE_SUM: lambda: (
                norm(change - vectors["previous"].to(change.device, torch.float32)) ** 2
            ),
        }
        metrics = [ways[metric]() for metric in self._measurement.metrics]
        if "previous" in vectors:
            vectors["previous"].copy_(change)
        if "sum" in vectors:
            vectors["sum"].zero_()
        return metrics

    def _next_means(self, vectors: Mapping[str, Tensor], change: Tensor) -> dict[str, Tensor]:
        """Take a step of the running means, in place; return them in float32.

        Elements settled at a former check would be frozen one by one, without further updates, so
        their means stay.
        """
        values = {"mean": change, "mean_abs": change.abs()}
        means = {k: vectors[k].to(change.device, torch.float32) for k in values if k in vectors}
        stays = None
        if "mean_abs" in means:
            stays = means["mean"].abs() <= self._measurement.threshold * means["mean_abs"]
        for kind, mean in means.items():
            before = mean.nan_to_num(nan=0.0)
            moved = torch.lerp(values[kind], before, self._measurement.decay)
            means[kind] = moved if stays is None else torch.where(stays, before, moved)
            vectors[kind].copy_(means[kind])
        return means

    def _change(self, i: int, vectors: Mapping[str, Tensor]) -> Tensor:
        """Return Delta_K of the local part of parameter ``i``, float32, on its device."""
        parameter = self._parameters[i]
        if self._measurement.source is Source.LAST_GRADIENT:
            gradient = self._gradient(i)
            missing = torch.zeros_like(local_part(parameter), dtype=torch.float32)
            return missing if gradient is None else gradient.float()
        device = local_part(parameter).device
        if self._measurement.source is Source.GRADIENTS:
            return vectors["sum"].to(device, torch.float32)
        # Rounded as the kept weights are, so that weights that stand still have not changed.
        now = local_part(parameter).to(vectors["weights"].dtype)
        change = now.float() - vectors["weights"].to(device).float()
        vectors["weights"].copy_(now)
        return change

    def state_dict(self) -> dict[str, Tensor]:
        """Return the vectors, sharded as the parameters are, by ``"<kind>.<parameter>"``."""
        return {
            f"{kind}.{name}": as_sharded(vector, parameter)
            for kind, kept in self._vectors.items()
            for name, parameter, vector in zip(self._names, self._parameters, kept, strict=True)
        }

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore the state of :meth:`state_dict`."""
        for kind, kept in self._vectors.items():
            for name, vector in zip(self._names, kept, strict=True):
                vector.copy_(local_part(state_dict[f"{kind}.{name}"]))


def _zeros(parameter: Tensor, on_host: bool, dtype: torch.dtype) -> Tensor:
    local = local_part(parameter)
    # Pinned, so that copies need not pass through another buffer.
    pinned = on_host and local.is_cuda
    device = torch.device("cpu") if on_host else local.device
    return torch.zeros(local.shape, dtype=dtype, device=device, pin_memory=pinned)
