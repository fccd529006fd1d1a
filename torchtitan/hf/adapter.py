"""Translates between our weights and those of a Hugging Face folder, tied embeddings included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torchtitan.models.llama3 import Transformer
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.tools.logging import logger

from torchtitan.hf.llama_args import model_args
from torchtitan.hf.llama_config import EMBEDDING, HEAD, LlamaConfig, read_settings


class LlamaAdapter(Llama3StateDictAdapter):
    """Upstream's adapter for llama3, which also takes folders whose embeddings are tied."""

    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        index = self.fqn_to_index_mapping
        if index is not None and EMBEDDING in index:
            # Trained models are never tied: saving one has to know a file for its output layer.
            index.setdefault(HEAD, index[EMBEDDING])

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
        return UntyingReader(path)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a Hugging Face folder of ``config`` has.

    A tied output layer is not among them.
    """
    args = model_args(config)
    with torch.device("meta"):
        weights = LlamaAdapter(args, None).to_hf(Transformer(args).state_dict())
    tied = {HEAD} if config.tie_word_embeddings else set()
    return {name: tuple(weights[name].shape) for name in weights if name not in tied}


class UntyingReader(HuggingFaceStorageReader):
    """Reads a folder with tied embeddings as if it held an output layer.

    Whoever asks for the output layer gets the embedding, be it on another rank than the embedding
    or on the same. An output layer that the file holds all the same is not used, as transformers
    does not use it.
    """

    def read_metadata(self) -> Metadata:
        """Return what the files hold, with an output layer shaped as the embedding."""
        metadata = super().read_metadata()
        metadata.state_dict_metadata[HEAD] = metadata.state_dict_metadata[EMBEDDING]
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` asks for, the output layer from where the embedding lies."""
        return super().read_data(
            LoadPlan([_from_embedding(item) for item in plan.items], plan.storage_data), planner
        )


def _from_embedding(item: ReadItem) -> ReadItem:
    source = item.storage_index
    if source.fqn != HEAD:
        return item
    return replace(item, storage_index=MetadataIndex(EMBEDDING, source.offset, source.index))
