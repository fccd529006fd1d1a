"""What a front's output depends on besides its weights and tokens."""

import itertools

import pytest
import torch

from tests.torchtitan.helpers.job_configs import config
from torchtitan.freezing.assembly.controller import front_identity


@pytest.mark.parametrize(
    ("dtype", "cast_to", "is_same"),
    [
        ("float32", "float32", True),
        ("float32", "bfloat16", False),
        ("bfloat16", "bfloat16", False),
        ("bfloat16", "float32", False),
    ],
)
def test_fsdp_computes_as_one_process_does_only_in_float32(
    dtype: str, cast_to: str, is_same: bool
) -> None:
    """FSDP casts all inputs of a block; autocast those of some operations."""
    job_config = config(training__dtype=dtype, training__mixed_precision_param=cast_to)
    named = {
        front_identity(job_config, "model", torch.device("cpu"), is_sharded=is_sharded)
        for is_sharded in (False, True)
    }
    assert (len(named) == 1) is is_same


def test_other_numbers_are_another_front() -> None:
    kinds = ("float32", "bfloat16")
    named = {
        front_identity(
            config(training__dtype=dtype, training__mixed_precision_param=cast_to),
            model,
            torch.device("cpu"),
            is_sharded=False,
        )
        for dtype, cast_to, model in itertools.product(kinds, kinds, ("one", "other"))
    }
    assert len(named) == 8
