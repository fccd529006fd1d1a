"""Weights of a LLaMA or its relatives, from a Hugging Face folder's names to ours and back."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor, Replicate
from torch.futures import Future
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.tools.logging import logger

from timelyfreeze.files import listed
from torchtitan.hf.decoder import Decoder, DecoderArgs
from torchtitan.hf.folder import Shapes, file_numbers, misfits, stored_shapes
from torchtitan.hf.llama_config import EMBEDDING, HEAD, read_settings
from torchtitan.lora.adapters import is_adapter

# {name in an attention of the files: ours}
_BIASES_AND_NORMS = {
    **{f"{name}_proj.bias": f"w{name}.bias" for name in "qkvo"},
    **{f"{name}_norm.weight": f"{name}_norm.weight" for name in "qk"},
}


class LlamaAdapter(Llama3StateDictAdapter):
    """Upstream's adapter for llama3, with further kinds of models.

    Folders with tied embeddings, heads of any width, biases, and norms of heads. Upstream rotates
    neighbours of a head, the files' models its halves, so the rows of ``wq`` and ``wk`` are
    reordered; biases and norms of queries and keys follow them.
    """

    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, None)
        self.hf_assets_path = hf_assets_path
        self.from_hf_map |= {
            f"model.layers.{{}}.self_attn.{theirs}": f"layers.{{}}.attention.{ours}"
            for theirs, ours in _BIASES_AND_NORMS.items()
        }
        index = self.fqn_to_index_mapping = file_numbers(hf_assets_path)
        if index is not None and EMBEDDING in index:
            # Trained models are never tied: saving one has to know a file for its output layer.
            index.setdefault(HEAD, index[EMBEDDING])

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors in the files' form, without adapters."""
        names = {ours: theirs for theirs, ours in self.from_hf_map.items() if ours}
        return {
            _renamed(name, names): self._reordered(name, tensor, (-1, 2))
            for name, tensor in state_dict.items()
            if not is_adapter(name)
        }

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors of files as the model has them."""
        names = {key: _renamed(key, self.from_hf_map) for key in hf_state_dict}
        return {
            name: self._reordered(name, hf_state_dict[key], (2, -1)) for key, name in names.items()
        }

    def _reordered(self, name: str, tensor: Tensor, halves: tuple[int, int]) -> Tensor:
        """Return a tensor of the model with the rows of heads in the other order."""
        args = self.model_args
        # How many heads lie behind one another in a tensor; all share one norm.
        n_heads = {
            "wq": args.n_heads,
            "wk": args.n_kv_heads or args.n_heads,
            **dict.fromkeys(("q_norm", "k_norm"), 1),
        }.get(name.rpartition("attention.")[2].partition(".")[0])
        if n_heads is None:
            return tensor
        if isinstance(tensor, DTensor) and n_heads % tensor.device_mesh.size():
            # Its shards cut heads.
            mesh = tensor.device_mesh
            whole = self._reordered(name, tensor.full_tensor(), halves)
            replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            return replicated.redistribute(placements=tensor.placements)
        half = tensor.shape[0] // n_heads // 2
        sizes = (half if n == -1 else n for n in halves)
        parts = tensor.view(n_heads, *sizes, *tensor.shape[1:])
        return parts.transpose(1, 2).reshape(tensor.shape)

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> HuggingFaceStorageReader:
        """Return a reader of ``path``, untying embeddings tied there."""
        is_tied = read_settings(Path(path)).get("tie_word_embeddings")
        # An output layer that such a folder holds all the same is taken, as by transformers.
        if not is_tied or HEAD in stored_shapes(Path(path)):
            return super().get_hf_storage_reader(path, from_quantized)
        logger.info(
            "The embeddings of %s are tied; the output layer starts as a copy of them and is "
            "trained apart from them",
            path,
        )
        return RenamingReader(path, {HEAD: EMBEDDING})


def _renamed(name: str, names: Mapping[str, Any]) -> str:
    """Return another name of a tensor, from ``names`` standing for all layers."""
    return names[re.sub(r"\d+", "{}", name, count=1)].format(*re.findall(r"\d+", name)[:1])


def tensor_shapes(args: DecoderArgs) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a folder of ``args``, but for a tied output layer."""
    with torch.device("meta"):
        weights = LlamaAdapter(args, None).to_hf(Decoder(args).state_dict())
    tied = {HEAD} if args.tie_word_embeddings else set()
    return {name: tuple(weights[name].shape) for name in weights if name not in tied}


def tensor_errors(args: DecoderArgs, shapes: Shapes) -> Iterator[str]:
    """Yield why tensors of some ``shapes`` cannot be the weights of ``args``."""
    expected = tensor_shapes(args)
    if HEAD in shapes:
        expected[HEAD] = expected[EMBEDDING]
    # Old folders keep the rotary frequencies, which follow from the configuration.
    ignored = {name for name in shapes if name.endswith("rotary_emb.inv_freq")}
    yield from misfits(expected, shapes)
    if unknown := sorted(shapes.keys() - expected.keys() - ignored):
        yield f"it has {listed(unknown)}, for which the model has no place"


class RenamingReader(HuggingFaceStorageReader):
    """Reads a folder under other names of its tensors, by ``stored_as``.

    Several names may share a stored tensor, on the same rank or on others. ``absent`` has the
    shapes of missing tensors, left unchanged.
    """

    def __init__(
        self, path: str, stored_as: Mapping[str, str], absent: Shapes | None = None
    ) -> None:
        super().__init__(path)
        self._stored_as = stored_as
        self._absent = absent or {}

    def read_metadata(self) -> Metadata:
        """Return the files' metadata, under the other names too, with absent tensors."""
        metadata = super().read_metadata()
        stored = metadata.state_dict_metadata
        stored.update({name: stored[there] for name, there in self._stored_as.items()})
        for name, shape in self._absent.items():
            whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
            stored[name] = TensorStorageMetadata(TensorProperties(), torch.Size(shape), [whole])
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of ``plan``."""
        items = []
        for item in plan.items:
            name = item.storage_index.fqn
            if name not in self._absent:
                there = replace(item.storage_index, fqn=self._stored_as.get(name, name))
                items.append(replace(item, storage_index=there))
        return super().read_data(LoadPlan(items, plan.storage_data), planner)
