"""Backward passes that skip the weight gradients of frozen parameters.

Two facts of the autograd engine carry the method. A backward that is told its ``inputs`` runs only
the nodes that lead to one of them, so the weight-gradient product of every other parameter is never
computed. And a parameter that no backward of a step has reached keeps ``grad = None``, which
optimizers skip entirely: neither weight decay nor moments touch it.

``requires_grad`` is never changed here: checkpoints drop the optimizer state of parameters without
it, and pipeline stages decide by it what to exchange. Compiled blocks need it off for the length of
their forward; see :mod:`timelyfreeze.runtime.compiled_blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


def masked_full_backward(
    outputs: Any,
    output_grads: Any,
    stage_inputs: Sequence[Any],
    live: Sequence[Tensor],
    chain_end: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Run one stage's backward, accumulating weight gradients into ``live`` only.

    Args:
        outputs: The stage's output, or its loss: a tensor, or the edge that is left of one that was
            sent and let go of (torch 2.15), or nested tuples, lists and dicts of them.
        output_grads: Gradients in the same nesting, or None for a scalar loss.
        stage_inputs: What the stage's forward received; a tensor that requires grad gets its
            gradient computed.
        live: Parameters that take part in this microbatch's update.
        chain_end: A tensor inside the stage down to which the chain of input gradients shall run
            even if nothing below it is live; its gradient is thrown away.

    Returns:
        One gradient, or None, for each of ``stage_inputs``. Their ``grad`` fields are cleared, so
        that nothing accumulates from one microbatch to the next.

    Raises:
        TypeError: If there is anything else among the outputs.
        RuntimeError: If tensors are live and no output has a graph that could lead to them.
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
    """Yield each output that has a graph behind it together with its gradient."""
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
    """Return the graph nodes that add gradients to ``parameters``, leaves that require grad.

    Autograd makes such a node when a parameter is first used and keeps one per parameter; a view is
    the public way to reach it.
    """
    nodes = set()
    for parameter in parameters:
        view = parameter.view_as(parameter)
        assert view.grad_fn is not None  # parameters require grad
        node = view.grad_fn.next_functions[0][0]
        assert node is not None  # what a leaf's view comes from adds to its gradient
        nodes.add(node)
    return nodes


def drop_frozen(
    param_groups: Sequence[dict[str, Any]], frozen_nodes: set[Node]
) -> list[dict[str, Any]]:
    """Leave only live parameters in the groups that a split backward's weight half works through.

    A group collects the parameters reached from the same intermediate nodes, as *nodes*, in no
    order that lines up with the module's parameters; so they are told apart by node
    (``accumulation_nodes``). A group without a live parameter is left out with all its work. Groups
    are copied, the caller's stay as they are.
    """
    kept = []
    for group in param_groups:
        live = {node for node in group["params"] if node not in frozen_nodes}
        if live:
            kept.append({**group, "params": live})
    return kept


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors among what a stage puts out."""
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    return [t for t in outputs if isinstance(t, Tensor)]


def zero_gradients(stage_inputs: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Return what goes to the stage in front where it has no use for gradients."""
    return tuple(
        torch.zeros_like(t) if isinstance(t, Tensor) and t.requires_grad else None
        for t in stage_inputs
    )
