"""Models and their weights, from a Hugging Face folder's words to upstream's and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor, Replicate
from torch.futures import Future
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.llama3.model.model import precompute_freqs_cis
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.utils import get_dense_model_nparams_and_flops
from torchtitan.tools.logging import logger

from torchtitan.hf.document_attention import DocumentAttention, DocumentTransformer
from torchtitan.hf.folder import StoredTensor, file_numbers, misfits, some_of
from torchtitan.hf.llama_config import EMBEDDING, HEAD, LlamaConfig, RopeScaling, read_settings
from torchtitan.lora.adapters import is_adapter

# What config.json's model and ours call the same.
_SAME_NAMES = (
    *("model_type", "head_dim", "qkv_bias", "output_bias", "qk_norm", "sliding_window"),
    "vocab_size",
)


def feed_forward_size(args: TransformerModelArgs) -> int:
    """Return the width that upstream's ``FeedForward`` makes of ``args``."""
    size = _plain_feed_forward_size(args.dim)
    if args.ffn_dim_multiplier is not None:
        size = int(args.ffn_dim_multiplier * size)
    return args.multiple_of * -(-size // args.multiple_of)


def _plain_feed_forward_size(dim: int) -> int:
    return int(2 * 4 * dim / 3)


def model_args(config: LlamaConfig) -> DecoderArgs:
    """Return upstream's description of ``config``; every call gives one of its own."""
    scaling = config.rope_scaling
    return DecoderArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        # The half keeps the product, which is rounded down, clear of the next lower number.
        ffn_dim_multiplier=(config.intermediate_size + 0.5)
        / _plain_feed_forward_size(config.hidden_size),
        multiple_of=1,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling_args=RoPEScalingArgs(*(astuple(scaling) if scaling else (1.0,))),
        max_seq_len=config.max_position_embeddings,
        **{name: getattr(config, name) for name in _SAME_NAMES},
    )


def config_of(args: TransformerModelArgs) -> LlamaConfig:
    """Return what upstream's ``args`` describe; they know no tied embeddings, as if untied."""
    scaling = args.rope_scaling_args
    own = as_decoder(args)
    return LlamaConfig(
        hidden_size=args.dim,
        intermediate_size=feed_forward_size(args),
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_heads if args.n_kv_heads is None else args.n_kv_heads,
        rms_norm_eps=args.norm_eps,
        rope_theta=float(args.rope_theta),
        rope_scaling=None
        if scaling.scaling_factor == 1.0
        else RopeScaling(*map(float, astuple(scaling)[:3]), astuple(scaling)[3]),
        max_position_embeddings=args.max_seq_len,
        **{name: getattr(own, name) for name in _SAME_NAMES},
    )


# {name in the files: ours}
_ATTENTION, _SELF_ATTENTION = "layers.{}.attention", "model.layers.{}.self_attn"
_BIASES = {
    f"{_SELF_ATTENTION}.{theirs}_proj.bias": f"{_ATTENTION}.w{theirs}.bias" for theirs in "qkvo"
}
_NORMS = {
    f"{_SELF_ATTENTION}.{theirs}_norm.weight": f"{_ATTENTION}.{theirs}_norm.weight"
    for theirs in "qk"
}


class LlamaAdapter(Llama3StateDictAdapter):
    """Upstream's adapter for llama3, and what it does not know.

    That is folders whose embeddings are tied, heads of any width, biases, and norms of heads.
    Upstream rotates neighbours of a head where the files' models rotate its halves, so it reorders
    the rows of ``wq`` and ``wk``; biases and norms of queries and keys follow them.
    """

    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, None)
        self.hf_assets_path = hf_assets_path
        self.from_hf_map |= _BIASES | _NORMS
        index = self.fqn_to_index_mapping = file_numbers(hf_assets_path)
        if index is not None and EMBEDDING in index:
            # Trained models are never tied: saving one has to know a file for its output layer.
            index.setdefault(HEAD, index[EMBEDDING])

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors as the files have them, which have none of adapters."""
        weights = {name: tensor for name, tensor in state_dict.items() if not is_adapter(name)}
        return super().to_hf(self._reordered(weights, self._permute))

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors of files as the model has them."""
        return self._reordered(super().from_hf(hf_state_dict), self._reverse_permute)

    def _reordered(
        self, state_dict: dict[str, Any], permute: Callable[[Tensor, int], Tensor]
    ) -> dict[str, Any]:
        """Return the model's tensors with the vectors of queries and keys reordered."""
        args = as_decoder(self.model_args)
        # How many heads lie behind one another in a vector; all share one norm.
        n_heads = {
            "wq.bias": args.n_heads,
            "wk.bias": args.n_kv_heads or args.n_heads,
            **dict.fromkeys(("q_norm.weight", "k_norm.weight"), 1),
        }
        changed = dict(state_dict)
        for name, tensor in state_dict.items():
            n = n_heads.get(name.rpartition("attention.")[2])
            if n is not None:
                changed[name] = permute(tensor.unsqueeze(1), n).squeeze(1)
        return changed

    # Upstream names sizes that hold for heads of dim / n_heads alone; the tensor has its own.
    def _permute(self, w: Tensor, n_heads_arg: int, *_: Any) -> Tensor:
        return _by_whole_heads(super()._permute, w, n_heads_arg)

    def _reverse_permute(self, w: Tensor, n_heads_arg: int, *_: Any) -> Tensor:
        return _by_whole_heads(super()._reverse_permute, w, n_heads_arg)

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> HuggingFaceStorageReader:
        """Return a reader of ``path``, which unties the embeddings if they are tied there."""
        if not read_settings(Path(path)).get("tie_word_embeddings"):
            return super().get_hf_storage_reader(path, from_quantized)
        logger.info(
            "The embeddings of %s are tied; the output layer starts as a copy of them and is "
            "trained apart from them",
            path,
        )
        # Nor does transformers use an output layer that such a folder holds all the same.
        return RenamingReader(path, {HEAD: EMBEDDING})


def _by_whole_heads(
    permute: Callable[[Tensor, int], Tensor], tensor: Tensor, n_heads: int
) -> Tensor:
    """Reorder the rows of each head; a tensor whose shards cut heads is gathered for that."""
    if not isinstance(tensor, DTensor) or n_heads % tensor.device_mesh.size() == 0:
        return permute(tensor, n_heads)
    mesh = tensor.device_mesh
    whole = permute(tensor.full_tensor(), n_heads)
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=tensor.placements)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a folder of ``config``, but for a tied output layer."""
    args = model_args(config)
    with torch.device("meta"):
        weights = LlamaAdapter(args, None).to_hf(Decoder(args).state_dict())
    tied = {HEAD} if config.tie_word_embeddings else set()
    return {name: tuple(weights[name].shape) for name in weights if name not in tied}


def tensor_errors(config: LlamaConfig, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Say what keeps ``tensors`` from being the weights of ``config``."""
    expected = tensor_shapes(config)
    # Old folders keep the rotary frequencies, which follow from the configuration.
    ignored = {name for name in tensors if name.endswith("rotary_emb.inv_freq")} | {HEAD}
    yield from misfits(expected, {name: tensor.shape for name, tensor in tensors.items()})
    if unknown := sorted(tensors.keys() - expected.keys() - ignored):
        yield f"it has {some_of(unknown)}, for which the model has no place"


class RenamingReader(HuggingFaceStorageReader):
    """Reads a folder as if it held tensors of other names: ``stored_as`` has what these are there.

    Several may be one tensor there, be they asked for on the same rank or on others.
    """

    def __init__(self, path: str, stored_as: Mapping[str, str]) -> None:
        super().__init__(path)
        self.stored_as = stored_as

    def read_metadata(self) -> Metadata:
        """Return what the files hold, under the other names too."""
        metadata = super().read_metadata()
        stored = metadata.state_dict_metadata
        stored.update({name: stored[there] for name, there in self.stored_as.items()})
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` asks for."""
        items = [
            replace(item, storage_index=self._there(item.storage_index)) for item in plan.items
        ]
        return super().read_data(LoadPlan(items, plan.storage_data), planner)

    def _there(self, asked: MetadataIndex) -> MetadataIndex:
        return replace(asked, fqn=self.stored_as.get(asked.fqn, asked.fqn))


@dataclass
class DecoderArgs(TransformerModelArgs):
    """Upstream's description of a llama3 model, and what :class:`LlamaConfig` has besides."""

    model_type: str = "llama"
    head_dim: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Fill in the width of a head."""
        if self.head_dim is None:
            self.head_dim = self.dim // self.n_heads

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters, and of operations for each token."""
        return get_dense_model_nparams_and_flops(self, model, 2 * self.head_dim, seq_len)


def as_decoder(args: TransformerModelArgs) -> DecoderArgs:
    """Return ``args`` of upstream in our words; our own are returned as they are."""
    return args if isinstance(args, DecoderArgs) else DecoderArgs(**vars(args))


class DecoderAttention(DocumentAttention):
    """Upstream's attention with the biases, norms and width of heads that ``args`` ask for."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args)
        self.head_dim = args.head_dim
        queries, keys = self.n_heads * args.head_dim, self.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, queries, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, keys, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, keys, bias=args.qkv_bias)
        self.wo = nn.Linear(queries, args.dim, bias=args.output_bias)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None

    def init_weights(self, init_std: float) -> None:
        """Draw weights as upstream does; biases begin at 0 and norms at 1."""
        super().init_weights(init_std)
        for linear in (self.wq, self.wk, self.wv, self.wo):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, the former two through their norms."""
        queries, keys, values = super().heads(x)
        if self.q_norm is not None:
            # Under autocast weights of norms keep their type, and torch has no fused norm of two.
            dtype = self.q_norm.weight.dtype
            queries = self.q_norm(queries.to(dtype)).type_as(values)
            keys = self.k_norm(keys.to(dtype)).type_as(values)
        return queries, keys, values


class Decoder(DocumentTransformer):
    """A model as ``config.json`` describes it, for packed sequences and others."""

    attention_class = DecoderAttention

    def _precompute_freqs_cis(self) -> torch.Tensor:
        args = self.model_args
        return precompute_freqs_cis(
            args.head_dim, args.max_seq_len, args.rope_theta, args.rope_scaling_args
        )
