"""The loss of learned tokens alone, without all logits in float32.

The rows of learned tokens are taken out in front of the last norm. Logits stay in the head's type,
and are overwritten by their gradient. Blocks of them pass through float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# A block of logits in float32.
BLOCK_BYTES = 32 * 1024**2
# Logits of a microbatch that are kept for the backward; more are computed again, in parts.
KEPT_BYTES = 1024**3

Head = Callable[[Tensor], Tensor]


def learned_loss(
    head: Head,
    hidden: Tensor,
    learned: Tensor,
    n_learned: Sequence[int],
    vocab_size: int,
    *,
    is_sharded: bool = False,
) -> Tensor:
    """Return the summed cross entropy, float32 [], of a microbatch's learned tokens.

    ``head`` computes logits, [n, V], of rows, [n, d], of ``hidden``, [B, T, d]. ``learned``, int64
    [B, 2, T], has places and labels of the first ``n_learned`` tokens of each row. Without any, the
    loss and all gradients are 0, still with a graph. A head ``is_sharded`` over replicas with
    different batches is called once, for any size of logits: the call may gather its weights.
    """
    n = sum(n_learned)
    length = hidden.shape[1]
    # A row that is not learned stands in where none is.
    counts = n_learned if n else (1, *[0] * (len(hidden) - 1))
    of_rows = [learned[row, :, :count] for row, count in enumerate(counts)]
    places = torch.cat([part[0] + row * length for row, part in enumerate(of_rows)])
    labels = torch.cat([part[1] for part in of_rows]).clamp(min=0)
    rows = hidden.flatten(0, 1).index_select(0, places)
    n_parts = -(-len(rows) * vocab_size * _computed_in(hidden).itemsize // KEPT_BYTES)
    if n_parts <= 1 or is_sharded:
        total = _CrossEntropy.apply(head(rows), labels, None)
    else:
        parts = zip(rows.chunk(n_parts), labels.chunk(n_parts), strict=True)
        total = sum(_CrossEntropy.apply(head(x), y, _again(head, x)) for x, y in parts)
    return total if n else total * 0.0


def _computed_in(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    is_cast = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else hidden.dtype


def _again(head: Head, rows: Tensor) -> Callable[[], Tensor]:
    """Return a function recomputing the logits, without a graph."""
    rows, kind = rows.detach(), rows.device.type
    is_cast, dtype = torch.is_autocast_enabled(kind), _computed_in(rows)

    def compute() -> Tensor:
        with torch.no_grad(), torch.autocast(kind, dtype, enabled=is_cast):
            return head(rows)

    return compute


class _CrossEntropy(Function):
    """The sum of cross entropies, float32 [], of logits, [n, V], under labels, int64 [n].

    ``again`` recomputes the logits for the backward; None keeps them. The gradient takes the place
    of the logits: a second backward of a graph is an error.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, again: Any) -> Tensor:
        total = logits.new_zeros((), dtype=torch.float32)
        for block, chosen in _blocks(logits, labels):
            total -= torch.log_softmax(block, 1, dtype=torch.float32).gather(1, chosen).sum()
        ctx.again = again
        ctx.save_for_backward(labels, *([] if again else [logits]))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        labels, *kept = ctx.saved_tensors
        # Whoever keeps the gradient must not keep the graph with it.
        logits = kept[0].detach() if kept else ctx.again()
        for block, chosen in _blocks(logits, labels):
            # A logarithm kept from the forward would round once for a whole row, which the
            # gradients of queries and keys, small differences, would show.
            shares = torch.softmax(block, 1, dtype=torch.float32)
            shares.scatter_(1, chosen, shares.gather(1, chosen) - 1.0)
            torch.mul(shares, grad, out=block)
        return logits, None, None


def _blocks(logits: Tensor, labels: Tensor) -> Any:
    """Return blocks of logits, [m, V], with their labels, [m, 1]."""
    m = max(1, BLOCK_BYTES // (4 * logits.shape[1]))
    return zip(logits.split(m), labels[:, None].split(m), strict=True)
