"""The benchmarks of the paper's Tables 6 to 8, and which of lm-eval's metrics each column shows.

Imports the standard library alone, so that scripts can read scores without lm-eval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """One benchmark as lm-eval runs it.

    Attributes:
        key: Its name here and in files.
        title: Its name in tables, as the paper has it.
        task: Name of lm-eval's task or group of tasks.
        n_shots: Solved examples before each question.
        metric: lm-eval's metric that is the accuracy.
        split: The split that lm-eval asks questions from.
        n_tasks: Tasks of lm-eval that it is made of; MMLU has one for each subject.
        counts: Whether it is one of the four that the average is over.
    """

    key: str
    title: str
    task: str
    n_shots: int
    metric: str = "acc"
    split: str = "validation"
    n_tasks: int = 1
    counts: bool = True

    def limit_of_task(self, limit: int | None) -> int | None:
        """Return how many questions each task asks for ``limit`` or a few more; None for all."""
        return None if limit is None else -(-limit // self.n_tasks)


BENCHMARKS = (
    Benchmark("mmlu", "MMLU", "mmlu", 5, split="test", n_tasks=57),
    Benchmark("hellaswag", "HellaSwag", "hellaswag", 0),
    Benchmark("arc_challenge", "ARC-C", "arc_challenge", 10, split="test"),
    Benchmark("truthfulqa_mc1", "TruthfulQA", "truthfulqa_mc1", 0),
    Benchmark("truthfulqa_mc2", "TruthfulQA mc2", "truthfulqa_mc2", 0, counts=False),
)
BY_KEY = {benchmark.key: benchmark for benchmark in BENCHMARKS}
AVERAGED = tuple(benchmark.key for benchmark in BENCHMARKS if benchmark.counts)


def average_accuracy(accuracies: Mapping[str, float]) -> float | None:
    """Return the mean of the four accuracies, each weighing the same; None if one is missing.

    Args:
        accuracies: Accuracy by the key of its benchmark; others than the four are left out.
    """
    if any(key not in accuracies for key in AVERAGED):
        return None
    return sum(accuracies[key] for key in AVERAGED) / len(AVERAGED)
