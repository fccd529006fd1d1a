"""Loaders of the instruction data among the test assets."""

from pathlib import Path
from typing import Any

from torchtitan.data.loader import loader_of, read_dataset
from torchtitan.data.sources import DataSource
from torchtitan.data.text.tokenizer import FolderTokenizer

ASSETS = Path(__file__).parents[2] / "assets"


def build_loader(**given: Any) -> Any:
    """Batches of 4, where nothing else is given."""
    given = {
        "dp_world_size": 1,
        "dp_rank": 0,
        "tokenizer": FolderTokenizer(str(ASSETS / "tokenizer")),
        "sources": [DataSource("alpaca", str(ASSETS / "tiny_instruct"))],
        "seq_len": 128,
        "batch_size": 4,
        **given,
    }
    size, loading = given.pop("batch_size"), given.pop("loading", {})
    return loader_of(read_dataset(**given), size, **loading)
