"""The reference: a copy of a few blocks run on the host, and its input."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from timelyfreeze.policies import Difference, ReferenceSettings
from timelyfreeze.policies.plasticity import similarity_loss
from timelyfreeze.policies.policy import INT8


@dataclass(frozen=True)
class CapturedBatch:
    """Inputs and outputs of blocks, of a microbatch, on the host."""

    step: int  # step that it is from
    first: int  # first layer of the blocks
    # what the first block was called with; the first of it is the input, [..., d]. The others get
    # the rest of it too
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]  # likewise
    # which rows of the output, as [-1, d], are kept, int64, shape [b]; None if its examples are the
    # rows, all of them kept
    rows: Tensor | None
    output: Tensor  # those rows, shape [b, ...]
    # waits for the device until all of this is there; None if it is
    copied: torch.cuda.Event | None = None

    def arrived(self) -> CapturedBatch:
        """Return the batch once all copies are there; blocks until then."""
        if self.copied is None:
            return self
        self.copied.synchronize()
        return replace(self, copied=None)


class InlineReference:
    """Compares in the training process, which waits.

    Blocks compute in float32, their linear layers and dense convolutions in 8 bits if wanted and
    possible; ``note`` has the reason against 8 bits.
    """

    def __init__(self, settings: ReferenceSettings) -> None:
        self._settings = settings
        self._blocks = nn.ModuleList()
        self._found: list[Difference] = []
        self.note: str | None = None

    def load(self, blocks: nn.ModuleList) -> None:
        """Compare with these blocks from now on; they are not changed any more."""
        self._blocks = blocks.float().eval()
        self.note = _quantize(self._blocks) if self._settings.precision == INT8 else None

    def offer(self, batch: CapturedBatch) -> bool:
        """Have a batch compared; return whether there was room."""
        self._found.append(self.difference(batch.arrived()))
        return True

    def difference(self, batch: CapturedBatch) -> Difference:
        """Return the plasticity of a batch."""
        hidden, *rest = (_single(value) for value in batch.args)
        kwargs = {name: _single(value) for name, value in batch.kwargs.items()}
        with torch.no_grad():
            for block in self._blocks:
                hidden = first_tensor(block(hidden, *rest, **kwargs))
        ours = hidden if batch.rows is None else hidden.flatten(0, -2)[batch.rows]
        value = similarity_loss(
            batch.output.float().numpy(), ours.float().numpy(), squared=self._settings.squared
        )
        return Difference(batch.step, batch.first, value)

    def take(self) -> tuple[list[Difference], int]:
        """Return the results since the last call, and the number of lost batches."""
        found, self._found = self._found, []
        return found, 0

    def close(self) -> None:
        """End whatever runs."""


def first_tensor(output: Any) -> Tensor:
    """Return a block's output, or the first of several."""
    tensor: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return tensor


def _single(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_single, value))
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_number else value


def _quantize(blocks: nn.ModuleList) -> str | None:
    """Have layers that gain by it compute in 8 bits, in place; return why not, if they cannot.

    Convolutions by group gain little or nothing, and lose a tenth of their output to rounding.
    """
    if torch.backends.quantized.engine == "none":
        return "torch has no engine for 8 bits on this machine"
    try:
        from torch.ao.nn.quantized.dynamic import Conv2d, Linear
        from torch.ao.quantization import default_dynamic_qconfig, quantize_dynamic
    except ImportError as error:
        return f"this torch has no dynamic quantization ({error})"
    chosen = {
        name: default_dynamic_qconfig
        for name, layer in blocks.named_modules()
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to move it to torchao
        mapping = {nn.Linear: Linear, nn.Conv2d: Conv2d}
        quantize_dynamic(blocks, chosen, mapping=mapping, inplace=True)
    return None
