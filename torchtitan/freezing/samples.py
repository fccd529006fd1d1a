"""``timelyfreeze samples``: sequences of instruction data as the model sees them.

Learned tokens are marked in the margin. Examples, chat template, packing and order are as in
training with the same configuration; no model is built.
"""

import argparse
from collections.abc import Sequence
from itertools import islice

from timelyfreeze.files.options import parse_with_keys, status_of, whole


def main(arguments: Sequence[str]) -> int:
    """Print the first sequences of the configured training data; return the exit status."""
    options, settings = parse_with_keys(_parser(), arguments)
    return status_of(lambda: _show(options, settings))


def _show(options: argparse.Namespace, settings: Sequence[str]) -> int:
    # Imported late: --help need not wait for torch.
    from torchtitan.freezing.checks import check_data
    from torchtitan.freezing.launch import prepare

    config = prepare([f"--job.config_file={options.config}", *settings])
    check_data(config)
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan.data.rows.kinds import is_instruct_dataset
    from torchtitan.data.sequences import sequence_text

    if not is_instruct_dataset(config.training.dataset):
        raise ValueError(
            f"training.dataset is {config.training.dataset!r}, which is no instruction data"
        )
    spec = get_train_spec(config.model.name)
    assert spec.build_tokenizer_fn is not None
    tokenizer = spec.build_tokenizer_fn(config)
    loader = spec.build_dataloader_fn(
        dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=config
    )
    for source in loader.dataset.examples.sources:
        print(f"-- {source.about}")
    print(f"-- chat template {loader.dataset.template.name!r}\n")
    for number, (inputs, labels) in enumerate(islice(loader.dataset, options.samples), start=1):
        text = sequence_text(
            inputs, labels, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        )
        print(f"-- sequence {number}: {text}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze samples",
        usage="%(prog)s CONFIG.toml [--samples N] [--section.key=value ...]",
        description="Prints sequences of instruction data as the model sees them, with what is "
        "learned in the margin.",
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file of the run")
    parser.add_argument(
        "--samples", type=whole(0), default=3, help="how many sequences (%(default)s)"
    )
    return parser
