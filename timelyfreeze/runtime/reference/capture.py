"""Takes what goes into neighbouring blocks of a stage and comes out of them, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from timelyfreeze.policies.plasticity import spread_evenly
from timelyfreeze.runtime.reference.model import CapturedBatch, first_tensor
from timelyfreeze.runtime.stage import FreezingStage

_PLAIN = (bool, int, float, str, type(None))


class Capture:
    """Hooks on blocks that copy the first microbatch that goes through them to the host.

    Copies from a GPU are begun and not waited for.

    Args:
        stage: Says which microbatch's forward runs.
        blocks: One or more, called one after the other.
        step: What the batch is labelled with.
        first: Likewise: the first layer.
        max_tokens: Tokens of the output [B, T, d] that are kept, at most. Where it is 0, and of
            outputs of another form, such as [B, C, H, W], whole examples are kept.
        n_tokens: Told when the batch runs: how many tokens at the beginning of each example of the
            first microbatch are no padding; None if nobody knows.
    """

    def __init__(
        self,
        stage: FreezingStage,
        blocks: Sequence[nn.Module],
        *,
        step: int,
        first: int,
        max_tokens: int,
        n_tokens: Callable[[], Sequence[int] | None] = lambda: None,
    ) -> None:
        self._stage = stage
        self._step, self._first = step, first
        self._max_tokens, self._n_tokens = max_tokens, n_tokens
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.batch: CapturedBatch | None = None
        self._hooks = [
            blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True),
            blocks[-1].register_forward_hook(self._leave),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    @property
    def _is_due(self) -> bool:
        return self._stage.forwarding == 0 and self.batch is None

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_due:
            return
        if not args or not isinstance(args[0], Tensor) or args[0].dim() < 2:
            raise ValueError(
                f"{type(block).__name__} is called without a hidden state as its first argument, "
                "so its output cannot be compared with a copy's; use another method than egeria"
            )
        self._inputs = (
            tuple(_to_host(value, block) for value in args),
            {name: _to_host(value, block) for name, value in kwargs.items()},
        )

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        if not self._is_due or self._inputs is None:
            return
        hidden = first_tensor(output).detach()
        rows = None
        if self._max_tokens and hidden.dim() == 3:
            rows = torch.from_numpy(self._rows(hidden.shape))
            hidden = hidden.flatten(0, -2).index_select(0, rows.to(hidden.device))
        elif len(hidden) < 2:
            raise ValueError(
                "a microbatch has one example, which is like no other; egeria compares how alike "
                "examples are, so give it two or more"
            )
        output_rows = _to_host(hidden, block)
        copied = None
        if hidden.is_cuda:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(hidden.device))
        args, kwargs = self._inputs
        self.batch = CapturedBatch(self._step, self._first, args, kwargs, rows, output_rows, copied)

    def _rows(self, shape: torch.Size) -> NDArray[np.int64]:
        """Return which rows of an output, as [-1, d], to keep: no padding, evenly spread."""
        length, n_rows = shape[-2], shape[:-1].numel()
        n_tokens = self._n_tokens()
        known = np.arange(n_rows)
        if n_tokens is not None and len(n_tokens) * length >= n_rows:
            limits = np.array(n_tokens[: n_rows // length])
            known = known[known % length < limits[known // length]]
        if len(known) == 0:  # an example of padding alone
            known = np.arange(n_rows)
        kept: NDArray[np.int64] = known[spread_evenly(len(known), self._max_tokens)]
        return kept


def _to_host(value: Any, block: nn.Module) -> Any:
    """Return a copy on the host, which may still be on its way from a GPU."""
    if isinstance(value, DTensor) or not isinstance(value, (Tensor, *_PLAIN)):
        raise ValueError(
            f"{type(block).__name__} is called with a {type(value).__name__}, which cannot be "
            "handed to a copy of it on the host; use another method than egeria, or for a mask of "
            "flex attention a model with 'sdpa'"
        )
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if not value.is_cuda:
        return value.to("cpu", copy=True)
    there = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return there.copy_(value, non_blocking=True)
