"""Prints sequences of instruction data as the model sees them, with what is learned in the margin.

Usage: .venv/bin/python torchtitan.freezing.samples.py [--samples N] --job.config_file=FILE [KEYS]

Examples, chat template, packing and order are those that training with the same arguments would use; a
model is not built. Keys are those of run_train.sh, for example --data.chat_template=tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """Print the first samples of the configured training data.

    Args:
        arguments: Ours, and those of the configuration.

    Returns:
        The exit status: 2 if the configuration has errors.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=3, help="how many sequences to print")
    options, settings = parser.parse_known_args(arguments)
    if options.samples < 0:
        print(f"error: --samples is {options.samples}; it must be 0 or more", file=sys.stderr)
        return 2
    # Imported late: --help need not wait for torch.
    from torchtitan.freezing.checks.configuration import ConfigError, check_examples
    from torchtitan.freezing.launch import prepare

    try:
        config = prepare(settings)
        check_examples(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan.data.sequences import sequence_text
    from torchtitan.data.turns import is_instruct_dataset

    if not is_instruct_dataset(config.training.dataset):
        print(
            f"error: training.dataset is {config.training.dataset!r}, which is no instruction data",
            file=sys.stderr,
        )
        return 2
    spec = get_train_spec(config.model.name)
    tokenizer = spec.build_tokenizer_fn(config)
    loader = spec.build_dataloader_fn(
        dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=config
    )
    for number, (inputs, labels) in enumerate(islice(loader.dataset, options.samples), start=1):
        text = sequence_text(
            inputs, labels, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        )
        print(f"-- sequence {number}: {text}\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
