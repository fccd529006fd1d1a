"""What is worked out of a trainer's configuration, without a run."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.torchtitan.helpers.job_configs import config
from timelyfreeze.policies.autofreeze import AutoFreeze
from timelyfreeze.policies.egeria import Egeria
from torchtitan.freezing.assembly import front_identity, policy_of
from torchtitan.settings import JobConfig


@pytest.mark.parametrize(("model", "compared"), [("llama3", 64), ("vit", 0), ("convnextv2", 0)])
def test_of_pictures_egeria_compares_whole_ones(model: str, compared: int) -> None:
    freezing = SimpleNamespace(egeria=Egeria(max_tokens=64))
    job_config = SimpleNamespace(freezing=freezing, model=SimpleNamespace(name=model))
    assert policy_of(SimpleNamespace(job_config=job_config), "egeria").max_tokens == compared


@pytest.mark.parametrize(("checks", "interval"), [(5, 10), (0, 7)])
def test_checks_of_an_epoch_are_counted_in_the_steps_of_all_readers(
    checks: int, interval: int
) -> None:
    """800 examples, 4 of them times 2 readers times 2 batches in a step: 50 steps an epoch."""
    policy = AutoFreeze(check_interval=7, checks_per_epoch=checks)
    trainer = SimpleNamespace(
        job_config=SimpleNamespace(
            freezing=SimpleNamespace(autofreeze=policy),
            training=SimpleNamespace(local_batch_size=4),
        ),
        parallel_dims=SimpleNamespace(dp_replicate=1, dp_shard=2),
        gradient_accumulation_steps=2,
        dataloader=SimpleNamespace(dataset=SimpleNamespace(n_examples_of_epoch=800)),
    )
    assert policy_of(trainer, "autofreeze").check_interval == interval


def identity(job_config: JobConfig, model: str, is_sharded: bool = False) -> str:
    dims = SimpleNamespace(fsdp_enabled=is_sharded)
    of_trainer = {"model_args": model, "device": torch.device("cpu"), "parallel_dims": dims}
    return front_identity(SimpleNamespace(job_config=job_config, **of_trainer))


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
    named = {identity(job_config, "model", is_sharded=sharded) for sharded in (False, True)}
    assert (len(named) == 1) is is_same


def test_other_numbers_are_another_front() -> None:
    kinds = ("float32", "bfloat16")
    named = {
        identity(config(training__dtype=dtype, training__mixed_precision_param=cast_to), model)
        for dtype, cast_to, model in itertools.product(kinds, kinds, ("one", "other"))
    }
    assert len(named) == 8
