"""Stages in 16 bits: how far gradients are from float32 ones, and what stages send."""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from timelyfreeze.runtime.linear import keep_copies, linears_of
from torchtitan.hf.decoder import Decoder, DecoderArgs
from torchtitan.hf.lean import compute_in

BF16 = torch.bfloat16
SIZES = {"dim": 96, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "vocab_size": 64}


def model(**more: object) -> Decoder:
    torch.manual_seed(0)
    made = Decoder(DecoderArgs(**SIZES, multiple_of=32, max_seq_len=32, **more))
    with torch.no_grad():
        made.init_weights()
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def batch() -> tuple[Tensor, Tensor, Tensor]:
    tokens, labels = (torch.randint(64, (4, 32)) for _ in range(2))
    return tokens, labels, torch.arange(32).remainder(11).expand(4, 32)


def gradients(part: Decoder) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(1)
    tokens, labels, positions = batch()
    with keep_copies([part]):
        logits = part(tokens, positions=positions)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
    return loss.item(), {name: p.grad for name, p in part.named_parameters()}


def lean(part: Decoder) -> Decoder:
    compute_in(part, BF16)
    return part


@pytest.mark.parametrize("more", [{}, {"qkv_bias": True, "output_bias": True}, {"qk_norm": True}])
def test_gradients_are_no_further_from_float32_than_those_of_weights_in_16_bits(more: dict) -> None:
    """The latter is what FSDP computes from its gathered weights."""
    loss, wanted = gradients(model(**more))
    by_fsdp = gradients(model(**more).to(BF16))
    by_stage = gradients(lean(model(**more)))

    def miss(found: tuple[float, dict[str, Tensor]]) -> float:
        """The distance of all gradients from float32 ones, over their length."""
        pairs = [(found[1][name], exact) for name, exact in wanted.items()]
        missed = sum((ours - exact).square().sum() for ours, exact in pairs)
        return float((missed / sum(exact.square().sum() for _, exact in pairs)).sqrt())

    assert by_stage[0] == pytest.approx(loss, rel=2e-3)
    assert 0.0 < miss(by_stage) < miss(by_fsdp)
    assert all(gradient.dtype == torch.float32 for gradient in by_stage[1].values())


def test_what_a_stage_sends_has_16_bits() -> None:
    first = lean(model())
    first.norm = first.output = None
    hidden = first(batch()[0])
    assert hidden.dtype == BF16
    middle = model()
    middle.tok_embeddings = middle.norm = middle.output = None
    assert lean(middle)(hidden).dtype == BF16


def test_recomputed_norms_and_their_weights_are_exact_where_nothing_is_rounded() -> None:
    """Powers of two have no more bits than 16-bit numbers hold."""
    part = lean(model())
    norm = part.layers["0"].attention_norm
    with torch.no_grad():
        norm.weight.fill_(0.5)
    x = torch.full((2, 4), 2.0, dtype=BF16)
    norm.normalized_shape, norm.weight = (4,), nn.Parameter(norm.weight[:4].detach())
    assert torch.equal(norm(x), torch.full((2, 4), 0.5, dtype=BF16))


def test_evaluation_sees_the_weights_of_now() -> None:
    part = lean(model())
    tokens = batch()[0]
    with torch.no_grad():
        before = part(tokens)
        part.layers["1"].feed_forward.w2.weight.mul_(2.0)
        after = part(tokens)
    assert not torch.equal(before, after)
    assert torch.equal(after, part(tokens).detach())
    assert linears_of(part).dtype == BF16


def kept_of_a_block(part: Decoder) -> int:
    """The bytes that a block keeps of a microbatch, without its input and copies of weights."""
    hidden = torch.randn(2, 32, SIZES["dim"], dtype=BF16, requires_grad=True)

    def forward() -> dict[int, torch.UntypedStorage]:
        alive: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            alive[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            part.layers["0"](hidden, part.freqs_cis, None, None)
        return alive

    with keep_copies([part]), linears_of(part).forwarding():  # type: ignore[union-attr]
        first, second = forward(), forward()
    return sum(second[key].nbytes() for key in second.keys() - first.keys())


@pytest.mark.slow
def test_a_compiled_block_keeps_less_than_an_eager_one() -> None:
    """So the estimate, which counts eager blocks, is an upper bound."""
    compiled = model()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled.layers["0"] = torch.compile(compiled.layers["0"], fullgraph=True, backend=backend)
    kept = kept_of_a_block(lean(compiled)), kept_of_a_block(lean(model()))
    assert 0 < kept[0] < kept[1]
