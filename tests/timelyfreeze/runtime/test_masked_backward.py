"""The oracle is always the unmasked backward times the mask, to the last bit."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from timelyfreeze.runtime.masked_backward import (
    accumulation_nodes,
    drop_frozen,
    masked_full_backward,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


class Net(nn.Module):
    """Biases, a weight used twice, and two outputs; every matrix has a shape of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(5, 6)
        self.b = nn.Linear(6, 7)
        self.c = nn.Linear(7, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.a(x))
        middle = torch.tanh(self.b(hidden))
        back = middle @ self.b.weight
        return self.c(middle), back + hidden


N_PARAMETERS = len(list(Net().parameters()))


def make_input(requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(10, 5, generator=generator, requires_grad=requires_grad)


def make_gradients() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(10, 4, generator=generator), torch.randn(10, 6, generator=generator)


def unmasked(forward: Callable[[Net, Tensor], Any], net: Net, x: Tensor) -> list[Tensor]:
    """Gradients of all parameters, then of the input."""
    outputs = forward(net, x)
    return list(torch.autograd.grad(outputs, [*net.parameters(), x], make_gradients()))


FORWARDS: dict[str, Callable[[Net, Tensor], Any]] = {
    "plain": lambda net, x: net(x),
    "checkpointed": lambda net, x: checkpoint(net, x, use_reentrant=False),
}


@pytest.mark.parametrize("name", FORWARDS)
@given(mask=st.lists(st.booleans(), min_size=N_PARAMETERS, max_size=N_PARAMETERS))
def test_live_gradients_are_exact_and_frozen_ones_none(name: str, mask: list[bool]) -> None:
    net, x = Net(), make_input()
    *wanted, wanted_input = unmasked(FORWARDS[name], net, x)
    live = [p for p, frozen in zip(net.parameters(), mask, strict=True) if not frozen]
    outputs = FORWARDS[name](net, x)
    (input_grad,) = masked_full_backward(outputs, make_gradients(), (x,), live)
    assert input_grad is not None
    assert torch.equal(input_grad, wanted_input)
    assert x.grad is None
    for parameter, gradient, frozen in zip(net.parameters(), wanted, mask, strict=True):
        assert parameter.requires_grad
        if frozen:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, gradient)


class MatrixProducts(TorchDispatchMode):
    """Counts matrix products by the shape of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes[tuple(result.shape)] += 1
        return result


@pytest.mark.parametrize("frozen", [{"a"}, {"b"}, {"c"}, {"a", "c"}, {"a", "b", "c"}, set()])
def test_no_product_is_computed_for_a_frozen_weight(frozen: set[str]) -> None:
    net, x = Net(), make_input()
    live = [p for name, p in net.named_parameters() if name.split(".")[0] not in frozen]
    outputs = net(x)
    with MatrixProducts() as products:
        masked_full_backward(outputs, make_gradients(), (x,), live)
    counts = {name: products.shapes[tuple(getattr(net, name).weight.shape)] for name in "abc"}
    uses = {"a": 1, "b": 2, "c": 1}
    assert counts == {name: 0 if name in frozen else uses[name] for name in "abc"}
    # The products that carry gradients back to the input are all still there.
    assert products.shapes[10, 5] == 1


@pytest.mark.parametrize("nest", ["tensor", "tuple", "list", "dict", "nested"])
def test_outputs_may_be_nested(nest: str) -> None:
    net, x = Net(), make_input()
    g, h = make_gradients()
    outputs, gradients = {
        "tensor": lambda a, b: (a, g),
        "tuple": lambda a, b: ((a, b), (g, h)),
        "list": lambda a, b: ([a, b], [g, h]),
        "dict": lambda a, b: ({"a": a, "b": b}, {"b": h, "a": g}),
        "nested": lambda a, b: ({"a": [a], "b": (b, 3)}, {"a": [g], "b": (h, None)}),
    }[nest](*net(x))
    a, b = net(x)
    pairs = ([a], [g]) if nest == "tensor" else ([a, b], [g, h])
    wanted = torch.autograd.grad(pairs[0], [x, *net.parameters()], pairs[1])
    (input_grad,) = masked_full_backward(outputs, gradients, (x,), list(net.parameters()))
    got = [input_grad, *(p.grad for p in net.parameters())]
    assert all(map(torch.equal, got, wanted))


def test_a_scalar_loss_needs_no_gradient() -> None:
    net, x = Net(), make_input()
    wanted = torch.autograd.grad(net(x)[0].square().sum(), [x, net.a.weight])
    (input_grad,) = masked_full_backward(net(x)[0].square().sum(), None, (x,), [net.a.weight])
    assert torch.equal(input_grad, wanted[0])
    assert torch.equal(net.a.weight.grad, wanted[1])


def test_outputs_without_a_graph_are_passed_over() -> None:
    net, x = Net(), make_input()
    output, _ = net(x)
    g, _ = make_gradients()
    wanted = torch.autograd.grad(net(x)[0], [x], g)
    grads = masked_full_backward((output, torch.ones(3)), (g, None), (x, torch.ones(2), 7), [])
    assert torch.equal(grads[0], wanted[0])
    assert grads[1:] == (None, None)


def test_the_edge_of_an_output_that_was_let_go_of_serves_as_well() -> None:
    """As torch 2.15 hands on what a stage has sent, among others of which nothing is left."""
    net, x = Net(), make_input()
    wanted = unmasked(FORWARDS["plain"], net, x)
    edges = (*map(get_gradient_edge, net(x)), None)
    (input_grad,) = masked_full_backward(edges, (*make_gradients(), None), (x,), [net.b.weight])
    names = [name for name, _ in net.named_parameters()]
    assert torch.equal(input_grad, wanted[-1])
    assert torch.equal(net.b.weight.grad, wanted[names.index("b.weight")])
    assert net.a.weight.grad is None


class Pair(NamedTuple):
    node: Any
    rows: Any


@pytest.mark.parametrize("strange", [object(), {1, 2}, Pair(object(), [3])])
def test_an_output_of_unknown_type_is_an_error(strange: Any) -> None:
    net, x = Net(), make_input()
    g, h = make_gradients()
    with pytest.raises(TypeError, match=r"an output of a stage holds a (object|set); a masked"):
        masked_full_backward((net(x)[0], strange), (g, h), (x,), [net.a.weight])
    assert net.a.weight.grad is None


@pytest.mark.parametrize("outputs", [None, (None,), (torch.ones(10, 4), 3)])
def test_live_tensors_without_a_graph_are_an_error(outputs: Any) -> None:
    net = Net()
    with pytest.raises(RuntimeError, match="1 tensors of a stage are live and none of its outputs"):
        masked_full_backward(outputs, None, (), [net.a.weight])
    assert masked_full_backward(outputs, None, (), []) == ()


def test_gradients_of_microbatches_add_up() -> None:
    net = Net()
    inputs = [make_input(), (make_input().detach() * 2).requires_grad_()]
    first, second = (unmasked(FORWARDS["plain"], net, x) for x in inputs)
    for x in inputs:
        masked_full_backward(net(x), make_gradients(), (x,), [net.a.weight, net.c.weight])
    names = [name for name, _ in net.named_parameters()]
    for name, one, two in zip(names, first[:-1], second[:-1], strict=True):
        parameter = net.get_parameter(name)
        if name in ("a.weight", "c.weight"):
            assert torch.equal(parameter.grad, one + two)
        else:
            assert parameter.grad is None


def test_a_live_parameter_that_the_microbatch_does_not_use_stays_without_gradient() -> None:
    net, x = Net(), make_input()
    output, _ = net(x)
    unused = nn.Parameter(torch.ones(3))
    masked_full_backward(output, make_gradients()[0], (x,), [net.a.weight, unused])
    assert unused.grad is None
    assert net.a.weight.grad is not None


def watch(tensor: Tensor) -> list[Tensor]:
    """Gradients that reach ``tensor``, as they come."""
    seen: list[Tensor] = []
    tensor.register_hook(seen.append)
    return seen


def test_without_a_target_no_backward_runs() -> None:
    net, x = Net(), make_input(requires_grad=False)
    outputs = net(x)
    seen = [watch(output) for output in outputs]
    assert masked_full_backward(outputs, make_gradients(), (x,), []) == (None,)
    assert seen == [[], []]
    masked_full_backward(outputs, make_gradients(), (x,), [net.a.bias])
    assert [len(each) for each in seen] == [1, 1]


def test_one_live_tensor_above_ends_the_chain_there() -> None:
    net, x = Net(), make_input(requires_grad=False)
    hidden = torch.tanh(net.a(x))
    seen = watch(hidden)
    output = net.c(torch.tanh(net.b(hidden)))
    masked_full_backward(output, make_gradients()[0], (x,), [net.c.weight])
    assert seen == []


@pytest.mark.parametrize("live_names", [set(), {"a.weight"}, {"c.weight"}, {"a.bias", "b.weight"}])
def test_a_chain_end_is_reached_and_keeps_no_gradient(live_names: set[str]) -> None:
    net, x = Net(), make_input(requires_grad=False)
    g, _ = make_gradients()

    def run(chained: bool) -> tuple[list[Tensor], Tensor]:
        hidden = torch.tanh(net.a(x))
        seen = watch(hidden)
        output = net.c(torch.tanh(net.b(hidden)))
        live = [net.get_parameter(name) for name in sorted(live_names)]
        masked_full_backward(output, g, (x,), live, hidden if chained else None)
        assert hidden.grad is None if chained else not hidden.retains_grad
        return seen, hidden

    seen, _ = run(chained=True)
    assert len(seen) == 1
    wanted_hidden = torch.tanh(net.a(x))
    wanted_output = net.c(torch.tanh(net.b(wanted_hidden)))
    names = [name for name, _ in net.named_parameters()]
    wanted = torch.autograd.grad(
        wanted_output, [wanted_hidden, *net.parameters()], g, allow_unused=True
    )
    assert torch.equal(seen[0], wanted[0])
    for name, gradient in zip(names, wanted[1:], strict=True):
        parameter = net.get_parameter(name)
        assert (parameter.grad is not None) == (name in live_names)
        if name in live_names:
            assert torch.equal(parameter.grad, gradient)


def test_accumulation_nodes_are_those_of_the_graph() -> None:
    net = Net()
    output = net(make_input())[0].sum() + net(make_input())[1].sum()
    reached, queue = set(), [output.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in reached:
            continue
        reached.add(node)
        queue += [after for after, _ in node.next_functions]
    for parameters in itertools.combinations(net.parameters(), 2):
        nodes = accumulation_nodes(parameters)
        assert len(nodes) == 2
        assert nodes <= reached
        assert {id(node.variable) for node in nodes} == set(map(id, parameters))


def test_groups_lose_frozen_parameters_and_vanish_without_live_ones() -> None:
    net = Net()
    net(make_input())
    a, b, c = (accumulation_nodes([p]) for p in (net.a.weight, net.b.weight, net.c.weight))
    groups = [
        {"params": a | b, "grads": ["x"], "intermediates": ["y"]},
        {"params": set(c), "grads": ["z"], "intermediates": ["v"]},
    ]
    kept = drop_frozen(groups, b | c)
    assert kept == [{"params": a, "grads": ["x"], "intermediates": ["y"]}]
    # The weight pass deletes from what it is given; the caller's groups must stay whole.
    del kept[0]["intermediates"]
    assert groups[0] == {"params": a | b, "grads": ["x"], "intermediates": ["y"]}
    assert drop_frozen(groups, set()) == groups
