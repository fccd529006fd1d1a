"""Backward passes without the weight gradients of frozen parameters.

Two facts of the autograd engine carry the method. A backward with given ``inputs`` runs only the
nodes leading to them, so the weight-gradient product of every other parameter is never computed.
And a parameter not reached by any backward of a step keeps ``grad = None``, skipped by optimizers
entirely: neither weight decay nor moments touch it.

``requires_grad`` is never changed here: checkpoints drop the optimizer state of parameters without
this flag, and pipeline stages exchange by the flag. Compiled blocks need the flag off for the
length of their forward; see :class:`CompiledBlocks`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


def masked_full_backward(
    outputs: Any,
    output_grads: Any,
    stage_inputs: Sequence[Any],
    live: Sequence[Tensor],
    chain_end: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Run a stage's backward, accumulating weight gradients into ``live`` only.

    ``outputs`` is the stage's output, or its loss: a tensor, or the edge left of a tensor sent and
    released (torch 2.15), or nested tuples, lists and dicts of them; ``output_grads`` nest alike,
    None for a scalar loss. Down to ``chain_end``, a tensor inside the stage, the chain of input
    gradients runs even if nothing below is live; its gradient is thrown away. Returns a gradient,
    or None, per input in ``stage_inputs``. Their ``grad`` fields are cleared, so nothing
    accumulates over microbatches.
    """
    wanted = [t for t in stage_inputs if isinstance(t, Tensor) and t.requires_grad]
    targets = [*wanted, *live]
    if chain_end is not None:
        targets.append(chain_end)
    pairs = list(_differentiable(outputs, output_grads))
    if live and not pairs:
        raise RuntimeError(
            f"{len(live)} tensors of a stage are live and none of its outputs has a graph; their "
            "gradients would be missing without an error"
        )
    # Without a target there is nothing to compute; backward(inputs=[]) would be an error.
    if targets and pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs], inputs=targets)
    if chain_end is not None:
        chain_end.grad = None
    grads = tuple(t.grad if isinstance(t, Tensor) else None for t in stage_inputs)
    for tensor in wanted:
        tensor.grad = None
    return grads


def _differentiable(outputs: Any, grads: Any) -> Iterator[tuple[Any, Tensor | None]]:
    """Yield the outputs with a graph, and their gradients."""
    if isinstance(outputs, GradientEdge):  # a named tuple, which must not be walked into
        yield outputs, grads
    elif isinstance(outputs, Tensor):
        if outputs.requires_grad:
            yield outputs, grads
    elif isinstance(outputs, dict):
        for key, output in outputs.items():
            yield from _differentiable(output, None if grads is None else grads[key])
    elif isinstance(outputs, (tuple, list)):
        for index, output in enumerate(outputs):
            yield from _differentiable(output, None if grads is None else grads[index])
    elif not isinstance(outputs, (type(None), int, float, str)):  # which lead nowhere
        raise TypeError(
            f"an output of a stage holds a {type(outputs).__name__}; a masked backward knows "
            "tensors, their gradient edges, numbers, texts, and tuples, lists and dicts of them"
        )


def accumulation_nodes(parameters: Iterable[Tensor]) -> set[Node]:
    """Return the graph nodes adding gradients to ``parameters``, leaves with ``requires_grad``."""
    return {get_gradient_edge(parameter).node for parameter in parameters}


def drop_frozen(
    param_groups: Sequence[dict[str, Any]], frozen_nodes: set[Node]
) -> list[dict[str, Any]]:
    """Leave only live parameters in the groups of a split backward's weight half.

    A group collects the parameters reached from the same intermediate nodes, as *nodes*, in another
    order than the module's parameters; so they are identified by node (``accumulation_nodes``). A
    group without a live parameter is left out with all its work. Groups are copied, the caller's
    stay as they are.
    """
    kept = []
    for group in param_groups:
        live = {node for node in group["params"] if node not in frozen_nodes}
        if live:
            kept.append({**group, "params": live})
    return kept


def wants_gradients(stage_inputs: Sequence[Any]) -> bool:
    """Return whether a stage in front takes the gradient of an input."""
    return any(isinstance(t, Tensor) and t.requires_grad for t in stage_inputs)


def zero_gradients(stage_inputs: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Return zeros for a stage in front without use for gradients."""
    return tuple(
        torch.zeros_like(t) if isinstance(t, Tensor) and t.requires_grad else None
        for t in stage_inputs
    )


class CompiledBlocks:
    """The modules inside a stage's module compiled by ``torch.compile``.

    To be called after parallelisms are applied: FSDP's hooks have to run before the hooks added to
    the blocks here. ``positions``: positions of blocks' parameters among those of ``module``.
    """

    def __init__(self, module: nn.Module) -> None:
        position = {id(p): i for i, p in enumerate(module.parameters())}
        blocks = [b for b in module.modules() if isinstance(b, OptimizedModule)]
        self._blocks = [b for b in blocks if any(True for _ in b.parameters())]
        self.positions = tuple(
            tuple(position[id(p)] for p in block.parameters()) for block in self._blocks
        )
        self._frozen: dict[nn.Module, NDArray[np.bool_]] = {}
        self._hidden: list[Tensor] = []
        self._missing: dict[nn.Module, NDArray[np.bool_]] = {}  # variants to be compiled
        for block in self._blocks:
            block.register_forward_pre_hook(self._hide, with_kwargs=True)
            block.register_forward_hook(self._show)

    def compile_frozen(self, exact: NDArray[np.bool_]) -> None:
        """Have blocks compiled with everything frozen but ``exact``, at their next forward.

        Compiling later, in the middle of a run, would exceed the others' wait for a step. Like
        blocks share a compilation.
        """
        pairs = zip(self._blocks, self.positions, strict=True)
        self._missing = {block: ~exact[list(where)] for block, where in pairs}

    @contextmanager
    def without_weight_gradients(self, mask: NDArray[np.bool_] | None) -> Iterator[None]:
        """Run the stage's forward without dW in the blocks frozen by ``mask``.

        The mask is over the module's parameters, True throughout a frozen block but for tensors
        always exact. None freezes nothing.
        """
        if mask is not None:
            pairs = zip(self._blocks, self.positions, strict=True)
            self._frozen = {block: mask[list(where)] for block, where in pairs}
        try:
            yield
        finally:
            self._frozen = {}
            self._show()

    def _hide(self, block: nn.Module, inputs: Any, kwargs: Any) -> None:
        # Without gradients at all, a third variant would be compiled for nothing.
        if not torch.is_grad_enabled():
            return
        if block in self._missing:
            self._hide_those(block, self._missing.pop(block))
            hidden, *others = inputs
            hidden = hidden.detach().requires_grad_()
            output = block.forward(hidden, *others, **kwargs)  # without hooks
            torch.autograd.grad(output, hidden, torch.zeros_like(output))
            self._show()
        if block in self._frozen:
            self._hide_those(block, self._frozen[block])

    def _hide_those(self, block: nn.Module, mask: NDArray[np.bool_]) -> None:
        pairs = zip(block.parameters(), mask, strict=True)
        self._hidden = [p for p, is_frozen in pairs if is_frozen and p.requires_grad]
        for parameter in self._hidden:
            parameter.requires_grad_(False)

    def _show(self, *hook_arguments: Any) -> None:
        for parameter in self._hidden:
            parameter.requires_grad_(True)
        self._hidden = []
