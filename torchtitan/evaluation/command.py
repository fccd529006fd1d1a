"""Scores a model with lm-eval: on the paper's benchmarks, or on any of its tasks.

    timelyfreeze evaluate RUN_OR_FOLDER [--tasks mmlu,gsm8k] [--limit N] [-- OPTIONS OF LM-EVAL]

Without --tasks: MMLU with 5 examples, HellaSwag with none, ARC-Challenge with 10, TruthfulQA
multiple choice with none. Other tasks show the examples that lm-eval gives them. The table is
printed. The scores go to scores.json in the run's folder, from where timelyfreeze compare takes
them, and to the run's TensorBoard; for a Hugging Face folder to that folder, or to --output. What
is there is replaced.

A run on pictures is scored on all of its validation pictures instead: top-1, top-5 and the loss.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from timelyfreeze.files import Number, broken_rule, shown, write_obstacle, write_whole
from timelyfreeze.records.scores import (
    AVERAGED,
    BY_KEY,
    HUB,
    SCORES,
    Scores,
    render_scores,
    scores_to_json,
)
from torchtitan.evaluation.harness import (
    Runner,
    ask,
    check_tasks,
    find_files,
    read_metrics,
    read_score,
    run_lm_eval,
)
from torchtitan.evaluation.pictures import reads_pictures, score_pictures

DTYPES = ("float32", "bfloat16", "float16")
SETTINGS = "settings.json"
_PICTURES = 64  # of a batch
_BATCH_SIZE = re.compile(r"auto(:[1-9][0-9]{0,8})?|[1-9][0-9]{0,8}")
# Writes the checkpoint of a run at a step as a Hugging Face folder, and returns the folder.
Exporter = Callable[[Path, int], Path]


@dataclass(frozen=True)
class Model:
    """A model to be scored: its Hugging Face folder, and its run and step."""

    folder: Path
    run: Path | None = None
    step: int | None = None


def unscored(model: Model, options: argparse.Namespace, source: str, **others: Any) -> Scores:
    """Return a model's empty scores, its device chosen."""
    import torch

    on_cpu = options.device == "cpu"
    return Scores(
        model=str(model.folder),
        step=model.step,
        dtype=options.dtype,
        device="cpu" if on_cpu else torch.cuda.get_device_name(options.device),
        evaluated_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        benchmarks={},
        source=source,
        limit=options.limit,
        options=shlex.join(options.further),
        **{"versions": {"torch": torch.__version__}, **others},
    )


def export(run: Path, step: int) -> Path:
    """Export a checkpoint of a run; the import is late because it loads the trainer's model."""
    from torchtitan.hf.export import export_run
    from torchtitan.vision.export import FORMS

    return export_run(run, step, forms=FORMS)


def find_model(path: Path, step: int | None = None, exporter: Exporter = export) -> Model:
    """Return the model of a Hugging Face folder, or of a run at ``path``, exported if need be."""
    if _is_hf_folder(path):
        if step is not None:
            raise ValueError(
                f"--step is {step}, but {path} is a Hugging Face folder, which holds one model; "
                "leave it out, or name a run"
            )
        return Model(path)
    # Imported late: --help need not wait for torch.
    from torchtitan.checkpoints.finished import chosen_step, read_run_settings

    run = _find_run(path)
    chosen, _ = chosen_step(run, read_run_settings(run), step)
    exported = run / f"hf_step-{chosen}"
    return Model(exported if _is_hf_folder(exported) else exporter(run, chosen), run, chosen)


def _is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


def _find_run(path: Path) -> Path:
    """Return the folder of the only run at ``path`` or below it."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; name a run or a Hugging Face folder")
    found = [path] if (path / SETTINGS).is_file() else []
    found = found or sorted(file.parent for file in path.rglob(SETTINGS))
    if not found:
        raise ValueError(
            f"{path} has neither config.json, as a Hugging Face folder, nor {SETTINGS}, as a run"
        )
    if len(found) > 1:
        raise ValueError(f"{path} has {len(found)} runs; name one: {', '.join(map(str, found))}")
    return found[0]


def main(
    arguments: Sequence[str], *, runner: Runner = run_lm_eval, exporter: Exporter = export
) -> int:
    """Score a model, and return the exit status; words behind ``--`` are lm-eval's."""
    options = _parse(arguments)
    try:
        _check(options, runner)
        model = find_model(options.model, options.step, exporter)
        output = options.output or model.run or model.folder
        if obstacle := write_obstacle(output):  # better told now than after hours of questions
            raise ValueError(f"scores go to {output}, but {obstacle}; name another with --output")
        output.mkdir(parents=True, exist_ok=True)
        # Imported late: --help need not wait for torch.
        import torch

        options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
        is_of_pictures = reads_pictures(model.folder)
        scores = (
            _on_pictures(model, options, output)
            if is_of_pictures
            else evaluate(model, options, output, runner)
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if model.run is not None and not is_of_pictures:  # whose TensorBoard has its validations
        write_tensorboard(model.run, scores)
    print(f"\n{render_scores(scores)}\n{output / SCORES}")
    return 0


def check(arguments: Sequence[str]) -> None:
    """Raise ValueError for wrong arguments of :func:`main`, as far as known without a model."""
    _check(_parse(arguments), run_lm_eval)


def evaluate(model: Model, options: argparse.Namespace, output: Path, runner: Runner) -> Scores:
    """Score a model, and save the scores after each task; ValueError if lm-eval fails."""
    batch_size = "8" if options.device == "cpu" else "auto"
    local = find_files(options.data_dir, options.tasks) if options.data_dir else {}
    scores = unscored(model, options, str(options.data_dir or HUB))
    # As JSON: a path may have a comma.
    model_args = json.dumps({"pretrained": str(model.folder), "dtype": options.dtype})
    for task in options.tasks:
        benchmark, files = BY_KEY.get(task), local.get(task)
        given = {
            "--model": "hf",
            "--model_args": model_args,
            "--tasks": task,
            "--num_fewshot": benchmark and benchmark.n_shots,
            "--limit": benchmark.limit_of_task(options.limit) if benchmark else options.limit,
            "--device": options.device,
            "--batch_size": options.batch_size or batch_size,
        }
        folder = output / "lm_eval" / re.sub(r"[^\w.-]", "_", task)
        results = ask(given, options.further, folder, runner, files)
        told = {name: str(results[f"{name}_version"]) for name in ("lm_eval", "transformers")}
        scores = replace(scores, versions={**scores.versions, **told})
        if benchmark is None:
            further = {**scores.further, **read_metrics(results, task)}
            scores = replace(scores, further=further)
        else:
            questions = files[benchmark.split].name if files else benchmark.split
            score = read_score(results, benchmark, questions)
            scores = replace(scores, benchmarks={**scores.benchmarks, task: score})
        scores = replace(scores, tasks=f"{scores.tasks},{task}".removeprefix(","))
        write_whole(output / SCORES, scores_to_json(scores).encode())
    return scores


def _on_pictures(model: Model, options: argparse.Namespace, output: Path) -> Scores:
    """Score an image classifier; raise for options of questions."""
    asked = {"--tasks": options.tasks != [*BY_KEY], "--data-dir": options.data_dir is not None,
             "--limit": options.limit is not None, "--": bool(options.further)}  # fmt: skip
    if given := [name for name, is_given in asked.items() if is_given]:
        raise ValueError(
            f"{model.folder} is an image classifier, scored on all validation pictures of its run; "
            f"leave out {', '.join(given)}"
        )
    if model.run is None:
        raise ValueError(
            f"{model.folder} does not say which pictures to score; name the run it was exported of"
        )
    size = _PICTURES if options.batch_size in (None, "auto") else int(options.batch_size)
    source, means = score_pictures(model.run, model.folder, options.device, options.dtype, size)
    versions = {name: version(name) for name in ("torch", "transformers")}
    further = {"pictures": means}
    scores = unscored(model, options, source, versions=versions, further=further, tasks="pictures")
    write_whole(output / SCORES, scores_to_json(scores).encode())
    return scores


def write_tensorboard(run: Path, scores: Scores) -> None:
    """Add the scores to the TensorBoard files of a run; accuracies in percent."""
    from torch.utils.tensorboard import SummaryWriter

    accuracies = {key: score.accuracy for key, score in scores.benchmarks.items()}
    if scores.average is not None:
        accuracies["average"] = scores.average
    with SummaryWriter(str(run)) as writer:
        for key, accuracy in accuracies.items():
            writer.add_scalar(f"accuracy(%)/{key}", 100 * accuracy, scores.step)
        for task, metrics in scores.further.items():
            for name, value in metrics.items():
                writer.add_scalar(f"lm_eval/{task}/{name}", value, scores.step)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, metavar="RUN_OR_FOLDER", help="a run, or a Hugging Face folder")
    add("--step", type=int, help="checkpoint of the run (default: the last)")
    add("--tasks", default=",".join(BY_KEY), metavar="A,B", help="(default: %(default)s)")
    add("--data-dir", type=Path, metavar="FOLDER", help="local questions instead of the hub's")
    add("--limit", type=int, metavar="N", help="the first N questions of each task")
    add("--output", type=Path, metavar="FOLDER", help=f"where {SCORES} goes")
    add("--device", help="such as cuda:1 (default: the first GPU, or the CPU)")
    add("--dtype", help="such as float32 (default: bfloat16 on a GPU, float32 on a CPU)")
    add("--batch-size", help="a number or auto (default: auto on a GPU, 8 on a CPU)")
    words = [*arguments, "--"]
    at = words.index("--")
    options = parser.parse_args(words[:at])
    options.further = words[at + 1 : -1]
    return options


def _check(options: argparse.Namespace, runner: Runner) -> None:
    """Raise for impossible options, before a model is exported or loaded; split the tasks."""
    for name in ("limit", "step"):
        value = getattr(options, name)
        if value is not None and (rule := broken_rule(Number, value)):
            raise ValueError(f"--{name} is {value}; {rule}")
    if options.batch_size is not None and not _BATCH_SIZE.fullmatch(options.batch_size):
        raise ValueError(
            f"--batch-size is {shown(options.batch_size)}; it must be auto, or a number, 1 or more"
        )
    if options.dtype not in (None, *DTYPES):
        raise ValueError(f"--dtype is {shown(options.dtype)}; known: {', '.join(DTYPES)}")
    if options.device is not None:
        _check_device(options.device)
    names = options.tasks.split(",")
    if broken := [name for name in names if not re.fullmatch(r"\S{1,1000}", name)]:
        raise ValueError(f"--tasks has {shown(broken[0])}; it must be names with commas between")
    ours = [key for key in BY_KEY if key in names]
    if ours and (missing := [key for key in AVERAGED if key not in ours]):
        print(f"No average: {', '.join(missing)} left out", file=sys.stderr)
    options.tasks = [*ours, *dict.fromkeys(name for name in names if name not in BY_KEY)]
    if options.data_dir is not None:
        find_files(options.data_dir, options.tasks)
    check_tasks([task for task in options.tasks if task not in BY_KEY], options.further, runner)


def _check_device(name: str) -> None:
    """Raise for a missing device: the model would be put on another, or nowhere."""
    if name == "cpu":
        return
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdecimal() or name == "cuda") or len(number) > 4:
        raise ValueError(f"--device is {shown(name)}; it must be cpu, cuda, or cuda:1 and the like")
    import torch

    if int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device is {name}; {torch.cuda.device_count()} GPUs are visible")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
