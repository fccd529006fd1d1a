"""``timelyfreeze export``: a run's weights as a Hugging Face folder, whatever its model."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from timelyfreeze.files.options import run_folder, status_of


def main(arguments: Sequence[str]) -> int:
    """Export as the command line says and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="timelyfreeze export", description="Writes a run's weights as a Hugging Face folder."
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder named by the run's report")
    add("step", type=int, nargs="?", metavar="STEP", help="of the checkpoint; default: last")
    add("--output", type=Path, help="folder to write; default: RUN/hf_step-STEP")
    add("--adapter", action="store_true", help="write the adapters alone, as a folder for peft")
    dtypes = ("bfloat16", "float16", "float32")
    add("--dtype", choices=dtypes, help="of the weights; default: as trained")
    add("--push", metavar="OWNER/NAME", help="send it to the hub, with a model card; new: private")
    options = parser.parse_args(arguments)
    return status_of(lambda: _export(options))


def _export(options: argparse.Namespace) -> int:
    # Imported late: --help need not wait for torch.
    import huggingface_hub
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools.logging import init_logger

    from timelyfreeze.records.summary import read_summary
    from torchtitan.hf.export import check_hub, export_run, model_card, push
    from torchtitan.vision.export import FORMS

    init_logger()
    dtype = TORCH_DTYPE_MAP[options.dtype] if options.dtype else None
    places = run_folder(options.run), options.step
    how = {"output": options.output, "dtype": dtype, "adapter": options.adapter}
    if options.push is not None:
        check_hub(options.push, huggingface_hub)
        card = model_card(options.push, read_summary(options.run))
    folder = export_run(*places, **how, forms=FORMS)
    print(folder)
    if options.push is not None:
        print(push(folder, card, options.push, huggingface_hub))
    return 0
