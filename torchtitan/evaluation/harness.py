"""lm-eval as this project uses it: one model, one benchmark at a time.

Needs the packages of the extra ``eval``.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from timelyfreeze.records import Benchmark, Score
from torchtitan.evaluation.questions import LocalQuestions, questions_from

# lm-eval's name of a metric ends in the filter that answers went through.
FILTER = "none"


@dataclass(frozen=True)
class Harness:
    """A loaded model with lm-eval's tasks.

    Attributes:
        lm: The model, as lm-eval wants it.
        tasks: lm-eval's register of tasks.
        dtype: Type that the model computes in.
        device: Where it computes.
        local: Where questions are; None for the hub.
        limit: Questions of each benchmark, or all if None; see ``Benchmark.limit_of_task``.
    """

    lm: LM
    tasks: TaskManager
    dtype: str
    device: str
    local: LocalQuestions | None = None
    limit: int | None = None

    def score(self, benchmark: Benchmark) -> Score:
        """Ask the questions of a benchmark.

        Raises:
            ValueError: If local questions are missing or broken.
        """
        local = self.local
        with nullcontext() if local is None else questions_from(local):
            results = simple_evaluate(
                model=self.lm,
                tasks=[benchmark.task],
                num_fewshot=benchmark.n_shots,
                limit=benchmark.limit_of_task(self.limit),
                task_manager=self.tasks,
                log_samples=False,
            )
        questions = benchmark.split if local is None else local.file(benchmark.key).name
        return read_score(results, benchmark, questions)


def read_score(results: dict[str, Any], benchmark: Benchmark, questions: str) -> Score:
    """Return what lm-eval's ``results`` of one benchmark say.

    Raises:
        ValueError: If the metric that is wanted is not among them.
    """
    metrics = results["results"][benchmark.task]
    name = f"{benchmark.metric},{FILTER}"
    if name not in metrics:
        raise ValueError(f"lm-eval gives no {name!r} for {benchmark.task}; it gives {[*metrics]}")
    others = {
        key.removesuffix(f",{FILTER}"): float(value)
        for key, value in metrics.items()
        if key.endswith(f",{FILTER}")
        and key != name
        and "_stderr" not in key
        and isinstance(value, int | float)
    }
    return Score(
        accuracy=float(metrics[name]),
        stderr=_number(metrics.get(f"{benchmark.metric}_stderr,{FILTER}")),
        n_questions=sum(counts["effective"] for counts in results["n-samples"].values()),
        questions=questions,
        n_shots=benchmark.n_shots,
        metric=f"{benchmark.task} {benchmark.metric}",
        others=others,
    )


def load_harness(
    folder: Path,
    *,
    local: LocalQuestions | None,
    limit: int | None,
    device: str | None,
    dtype: str | None,
    batch_size: str | None,
) -> Harness:
    """Load a Hugging Face folder.

    Args:
        folder: The model with its tokenizer.
        local: Where questions are; None for the hub.
        limit: Questions of each benchmark, or all if None; see ``Benchmark.limit_of_task``.
        device: Such as ``cuda:1``; None for the first GPU, or the CPU where there is none.
        dtype: Such as ``float32``; None for bfloat16 on a GPU and float32 on a CPU.
        batch_size: A number, or ``auto`` for the largest that fits; None for that on a GPU and 8 on
            a CPU.
    """
    from lm_eval.models.huggingface import HFLM

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = device == "cpu"
    dtype = dtype or ("float32" if on_cpu else "bfloat16")
    lm = HFLM(
        pretrained=str(folder),
        device=device,
        dtype=dtype,
        batch_size=batch_size or (8 if on_cpu else "auto"),
    )
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return Harness(lm, TaskManager(), dtype, name, local, limit)


def versions() -> dict[str, str]:
    """Return the versions that scores depend on."""
    return {name: version(name) for name in ("lm_eval", "transformers", "torch")}


def _number(value: Any) -> float | None:
    """Return ``value``, or None where lm-eval has put a text for what it did not compute."""
    return float(value) if isinstance(value, int | float) else None
