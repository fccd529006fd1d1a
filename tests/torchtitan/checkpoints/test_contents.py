"""A table of contents is read as torch reads it, and nothing that it names is run."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from torchtitan.checkpoints.contents import METADATA, read_contents
from torchtitan.checkpoints.finished import damage, saved_keys, saved_shapes
from torchtitan.hf.weights import StoredWeights


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_it_is_what_torch_reads(tmp_path: Path) -> None:
    types = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)
    state: dict[str, Any] = {str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in types}
    dcp.save({**state, "nested": {"list": [1, "x", torch.ones(4)]}}, checkpoint_id=tmp_path)
    ours, theirs = read_contents(tmp_path), FileSystemReader(tmp_path).read_metadata()
    for field in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert damage(tmp_path) is None


class Names:
    """Pickled, it names a function and what to call it with."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_it_names_is_not_run(tmp_path: Path, protocol: int) -> None:
    ran = tmp_path / "ran"
    for evil in (Names(os.mkdir, str(ran)), Names(torch.load, str(ran)), Names(eval, "1")):
        (tmp_path / METADATA).write_bytes(pickle.dumps(evil, protocol=protocol))
        assert "which no checkpoint needs" in str(damage(tmp_path))
        assert (saved_keys(tmp_path), saved_shapes(tmp_path)) == ({}, {})
        with pytest.raises(ValueError, match=r"is damaged: .*which no checkpoint needs"):
            StoredWeights(tmp_path)
    # A name that leads on from one that is known.
    (tmp_path / METADATA).write_bytes(
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08os.mkdir\x93."
    )
    assert "which no checkpoint needs" in str(damage(tmp_path))
    (tmp_path / METADATA).write_bytes(pickle.dumps(3))
    assert "no table of contents" in str(damage(tmp_path))
    assert not ran.exists()
