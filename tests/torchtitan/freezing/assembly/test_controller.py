"""What is worked out of a trainer's configuration, without a run."""

from types import SimpleNamespace

import pytest

from timelyfreeze.policies.autofreeze import AutoFreeze
from timelyfreeze.policies.egeria import Egeria
from torchtitan.freezing.assembly.controller import policy_of


@pytest.mark.parametrize(("model", "compared"), [("llama3", 64), ("vit", 0), ("convnextv2", 0)])
def test_of_pictures_egeria_compares_whole_ones(model: str, compared: int) -> None:
    freezing = SimpleNamespace(egeria=Egeria(max_tokens=64))
    config = SimpleNamespace(freezing=freezing, model=SimpleNamespace(name=model))
    assert policy_of(SimpleNamespace(job_config=config), "egeria").max_tokens == compared


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
