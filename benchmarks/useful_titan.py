"""Ours and plain TorchTitan for useful_tokens.py.

    python benchmarks/useful_titan.py {ours,plain} COLD_STEPS --key=value ...

Plain is upstream's trainer, model, loss and optimizer with our batches. Upstream has no mask that a
CPU trains with, so examples of a sequence see one another there; and it reads no tied head, so its
weights are random.
"""

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import torch
from torchtitan.models.llama3 import get_train_spec
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.protocols import train_spec
from torchtitan.train import Trainer
from turns import turns

from torchtitan.freezing.launch import prepare, trainer_for
from torchtitan.settings import JobConfig


def plain_trainer(config: JobConfig) -> Trainer:
    """Return upstream's trainer of the same model in upstream's words, fed by our loader."""
    name, flavor = config.model.name, config.model.flavor
    ours = train_spec.get_train_spec(name)
    asked = {f.name: getattr(ours.model_args[flavor], f.name) for f in fields(TransformerModelArgs)}
    train_spec._extra_train_specs[name] = replace(
        get_train_spec(),
        model_args={flavor: TransformerModelArgs(**asked)},
        build_tokenizer_fn=ours.build_tokenizer_fn,
        build_dataloader_fn=ours.build_dataloader_fn,
    )
    trainer = Trainer(config)
    trainer.post_dataloading_process = lambda inputs, labels: (inputs["input"], labels, {}, {})
    return trainer


def mean_learned(config: JobConfig) -> float:
    """Return the learned tokens of a sequence, over at least one epoch."""
    spec = train_spec.get_train_spec(config.model.name)
    place = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": spec.build_tokenizer_fn(config)}
    loader = spec.build_dataloader_fn(**place, job_config=config)
    n_batches = -(-len(loader.dataset.examples) // config.training.local_batch_size)
    labels = torch.cat([labels for _, labels in islice(loader, n_batches)])
    return int((labels != -100).sum()) / len(labels)


def main(kind: str, cold: str, *keys: str) -> None:
    """Train until nobody gives the word any more."""
    torch.set_num_threads(1)
    config = prepare(keys)
    steps = turns(int(cold), mean_learned(config))
    trainer = plain_trainer(config) if kind == "plain" else trainer_for(config)(config)
    train_step = trainer.train_step

    def step_and_wait(batches: Iterator[Any]) -> None:
        train_step(batches)
        next(steps)

    trainer.train_step = step_and_wait
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
