"""lm-eval's prompts and metrics: by hand, and against lm-eval left alone.

Needs the packages of the extra ``eval``; what needs real questions looks for them in ../shared.
"""

import functools
import gzip
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (scripts/setup.sh eval)")

import datasets
from lm_eval import evaluator, simple_evaluate
from lm_eval._cli import HarnessCLI
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from tests.torchtitan.evaluation.question_files import mmlu_row, write_questions, write_rows
from timelyfreeze.records.scores import BENCHMARKS, BY_KEY, Score
from torchtitan.evaluation.harness import (
    SOURCES,
    find_files,
    lm_eval_tasks,
    read_score,
    write_tasks,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
REAL = ROOT.parent / "shared" / "data" / "eval"
# What lm-eval's tasks call the data set on the hub, and its configuration.
HUB = {
    "mmlu": ("cais/mmlu", None),
    "hellaswag": ("Rowan/hellaswag", "default"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge"),
    "truthfulqa_mc1": ("truthfulqa/truthful_qa", "multiple_choice"),
    "truthfulqa_mc2": ("truthfulqa/truthful_qa", "multiple_choice"),
}


@functools.cache
def lm_evals_tasks() -> TaskManager:
    """Those of lm-eval that we ask; to read all there are takes seconds."""
    folders = {source.tasks.split("/")[0] for source in SOURCES.values()}
    return TaskManager(
        include_path=[lm_eval_tasks() / folder for folder in sorted(folders)],
        include_defaults=False,
    )


def with_tasks(include_path: Any = None, **options: Any) -> TaskManager:
    """These tasks, and those of a folder that come before them."""
    folders = [*(lm_evals_tasks().include_path or ()), *([include_path] if include_path else ())]
    return TaskManager(include_path=folders, include_defaults=False, **options)


def lm_eval_in_this_process(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Stand for ``run_lm_eval``, with the tasks that we ask and without the seconds of imports."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr("lm_eval.tasks.TaskManager", with_tasks)
        patch.setattr("sys.argv", ["lm_eval", *arguments])
        command_line = HarnessCLI()
        command_line.execute(command_line.parse_args())


@pytest.fixture(autouse=True)
def _nobody_asks_for_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval starts pip to tell in its results what is installed."""
    versions = {"lm_eval_version": "0.0", "transformers_version": "0.1"}
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: results.update(versions))


class Oracle(LM):
    """A model whose answers are given by a rule; keeps what it was asked."""

    def __init__(self, log_likelihood: Callable[[str, str], float] = lambda *_: -1.0) -> None:
        super().__init__()
        self._log_likelihood = log_likelihood
        self.asked: list[tuple[str, str]] = []

    def loglikelihood(self, requests: list[Any], **_options: Any) -> list[tuple[float, bool]]:
        self.asked += [request.args for request in requests]
        return [(self._log_likelihood(*request.args), False) for request in requests]

    def loglikelihood_rolling(self, requests: list[Any], **_options: Any) -> list[float]:
        pytest.fail("multiple choice asks for likelihoods of continuations alone")

    def generate_until(self, requests: list[Any], **_options: Any) -> list[str]:
        pytest.fail("multiple choice asks for likelihoods of continuations alone")


def asked(task: str, n_shots: int, tasks: TaskManager) -> list[tuple[str, str]]:
    """Prompts and continuations of lm-eval's task, in lm-eval's order."""
    lm = Oracle()
    simple_evaluate(
        model=lm, tasks=[task], num_fewshot=n_shots, task_manager=tasks, log_samples=False
    )
    return lm.asked


def local_tasks(files: Path, folder: Path) -> TaskManager:
    """lm-eval's tasks, with local questions for all benchmarks."""
    for key, of_task in find_files(files, list(BY_KEY)).items():
        (folder / key).mkdir(parents=True)
        write_tasks(of_task, key, folder / key)
    return with_tasks(folder)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Questions made up here, of all subjects: three of each, and nine more of one."""
    folder, names = tmp_path_factory.mktemp("made_up"), subjects()
    files = write_questions(folder / "files", subjects=names)
    rows = [mmlu_row(name, "validation", n) for name in names for n in range(3)]
    # All of the nine have the answer A.
    rows += [mmlu_row("anatomy", "validation", 4 * n) for n in range(9)]
    write_rows(files / "mmlu_validation.jsonl", rows)
    return local_tasks(files, folder / "tasks")


def score(key: str, tasks: TaskManager, limit: int | None = None) -> Score:
    benchmark = BY_KEY[key]
    results = simple_evaluate(
        model=Oracle(rule),
        tasks=[benchmark.task],
        num_fewshot=benchmark.n_shots,
        limit=benchmark.limit_of_task(limit),
        task_manager=tasks,
        log_samples=False,
    )
    return read_score(results, benchmark, "a file")


def subjects() -> list[str]:
    """The 57 subjects that lm-eval's MMLU asks for."""
    tasks = lm_evals_tasks()
    names = [name for name in tasks.all_tasks if name.endswith("_tasks")]
    groups = [name for name in names if name.startswith("mmlu_") and name.count("_") <= 3]
    found = {
        task
        for group in groups
        for task in tasks.task_index[group].tags
        if tasks.task_index[task].yaml_path.parent.name == "default"
        and tasks.task_index[task].yaml_path.parents[1].name == "mmlu"
    }
    return sorted(name.removeprefix("mmlu_") for name in found)


# -- prompts by hand -------------------------------------------------------------------------------


def test_mmlu_shows_five_examples_of_the_subject(made_up: TaskManager) -> None:
    shown = [
        f"What is part {n} of anatomy (dev)?\nA. anatomy p{n}\nB. anatomy q{n}\nC. anatomy r{n}\n"
        f"D. anatomy s{n}\nAnswer: {'ABCD'[n % 4]}\n\n"
        for n in range(5)
    ]
    question = (
        "What is part 0 of anatomy (validation)?\nA. anatomy p0\nB. anatomy q0\nC. anatomy r0\n"
        "D. anatomy s0\nAnswer:"
    )
    head = "The following are multiple choice questions (with answers) about anatomy.\n\n"
    found = asked("mmlu_anatomy", 5, made_up)
    assert found[:4] == [(head + "".join(shown) + question, f" {letter}") for letter in "ABCD"]
    assert len(found) == 4 * (3 + 9)


def test_hellaswag_shows_none_and_cleans_its_text(made_up: TaskManager) -> None:
    found = asked("hellaswag", 0, made_up)
    assert found[4:8] == [
        ("Juggling: A man holds 1 balls. He", f" throws {n} of 1. Then he rests.") for n in range(4)
    ]
    assert len(found) == 12


def test_arc_draws_ten_examples_with_lm_evals_seed(made_up: TaskManager) -> None:
    drawn = random.Random(1234).sample(range(12), 10)
    shown = [
        f"Question: Which stone of train {n} is heaviest?\nAnswer: stone {n % 4} of {n}\n\n"
        for n in drawn
    ]
    question = "Question: Which stone of validation 0 is heaviest?\nAnswer:"
    found = asked("arc_challenge", 10, made_up)
    assert found[:4] == [("".join(shown) + question, f" stone {n} of 0") for n in range(4)]
    assert len(found) == 12


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("truthfulqa_mc1", [" 2 legs.", " None.", " Nine."]),
        ("truthfulqa_mc2", [" 2 legs.", " It has legs.", " Nine.", " None."]),
    ],
)
def test_truthfulqa_has_its_fixed_opening(
    made_up: TaskManager, task: str, answers: list[str]
) -> None:
    found = asked(task, 0, made_up)[-len(answers) :]
    assert [answer for _, answer in found] == answers
    (prompt,) = {prompt for prompt, _ in found}
    *opening, last = prompt.split("\n\n")
    assert len(opening) == 6
    assert all(part.startswith("Q: ") and "\nA: " in part for part in opening)
    assert last == "Q: How many legs has animal 2?\nA:"


# -- prompts against lm-eval left alone ------------------------------------------------------------


def write_hub(folder: Path, files: Path, names: Iterable[str]) -> None:
    """Lay ``files`` out as data sets that ``datasets`` finds under their names on the hub.

    ``load_dataset`` takes a folder of that name before it looks on the hub.
    """
    for key, of_task in find_files(files, list(BY_KEY)).items():
        path, config = HUB[key]
        configs = []
        for name in names if config is None else [config]:
            rows = {split: read_rows(file) for split, file in of_task.items()}
            if config is None:
                rows = {
                    s: [row for row in all_ if row["subject"] == name] for s, all_ in rows.items()
                }
            if key == "hellaswag":
                rows["train"] = rows["validation"]  # lm-eval looks for it; nobody draws from it
            parts = []
            for split, of_split in rows.items():
                place = folder / path / name / f"{split}.jsonl"
                place.parent.mkdir(parents=True, exist_ok=True)
                write_rows(place, of_split)
                parts.append({"split": split, "path": f"{place.parent.name}/{place.name}"})
            configs.append({"config_name": name, "data_files": parts})
        card = f"---\nconfigs: {json.dumps(configs)}\n---\n"
        (folder / path / "README.md").write_text(card)


def read_rows(path: Path) -> list[dict[str, Any]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check_equal_prompts(
    files: Path, hub: Path, names: list[str], tasks: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write_hub(hub, files, names)
    local = local_tasks(files, hub.parent / "tasks")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", hub / "cache")
    monkeypatch.chdir(hub)
    for task, n_shots in tasks:
        alone = asked(task, n_shots, lm_evals_tasks())
        assert len(alone) > 0
        assert asked(task, n_shots, local) == alone, task


def test_prompts_are_those_of_lm_eval_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [("mmlu_anatomy", 5), ("mmlu_virology", 5), ("hellaswag", 0), ("arc_challenge", 10),
             ("truthfulqa_mc1", 0), ("truthfulqa_mc2", 0)]  # fmt: skip
    files = write_questions(tmp_path / "files", subjects=subjects())
    check_equal_prompts(files, tmp_path / "hub", ["anatomy", "virology"], tasks, monkeypatch)


@pytest.mark.long
@pytest.mark.skipif(not REAL.is_dir(), reason="no real questions in ../shared/data/eval")
def test_real_prompts_are_those_of_lm_eval_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [(BY_KEY[key].task, BY_KEY[key].n_shots) for key in BY_KEY if key != "mmlu"]
    some = ["abstract_algebra", "world_religions"]
    tasks += [(f"mmlu_{name}", 5) for name in some]
    files = tmp_path / "files"
    files.mkdir()
    for path in REAL.glob("*.jsonl*"):
        rows = read_rows(path)
        if "_validation" in path.name and not path.name.startswith("mmlu"):
            rows = rows[:100]
        write_rows(files / path.name, rows)
    check_equal_prompts(files, tmp_path / "hub", some, tasks, monkeypatch)


# -- metrics ---------------------------------------------------------------------------------------


def rule(_prompt: str, answer: str) -> float:
    """Prefers what is right for question 0 of MMLU and HellaSwag, and 1 of ARC and TruthfulQA."""
    if answer == " A" or answer.startswith((" throws 0", " stone 1 of", " 1 legs")):
        return 0.0
    return -1.0 if answer == " None." else -9.0


def test_accuracies_by_hand(made_up: TaskManager) -> None:
    scores = {benchmark.key: score(benchmark.key, made_up) for benchmark in BENCHMARKS}
    for key in ("hellaswag", "arc_challenge", "truthfulqa_mc1"):
        assert scores[key].accuracy == pytest.approx(1 / 3), key
    # Of questions, not of subjects: one of three is right, and the nine more of one subject.
    assert len(subjects()) == 57
    assert scores["mmlu"].accuracy == pytest.approx((57 + 9) / (57 * 3 + 9))
    # Mass of the right answers, 1 legs and It has legs, among all four.
    wrong = 2 * math.exp(-9) / (3 * math.exp(-9) + math.exp(-1))
    right = (1 + math.exp(-9)) / (1 + 2 * math.exp(-9) + math.exp(-1))
    assert scores["truthfulqa_mc2"].accuracy == pytest.approx((2 * wrong + right) / 3)
    assert {key: found.n_questions for key, found in scores.items()} == {
        "mmlu": 57 * 3 + 9, "hellaswag": 3, "arc_challenge": 3, "truthfulqa_mc1": 3,
        "truthfulqa_mc2": 3,
    }  # fmt: skip
    # Standard error of the mean of 1, 0, 0.
    assert scores["hellaswag"].stderr == pytest.approx(1 / 3)
    assert scores["hellaswag"].n_shots == 0
    assert (scores["mmlu"].n_shots, scores["arc_challenge"].n_shots) == (5, 10)
    assert scores["hellaswag"].others.keys() == {"acc_norm"}
    assert scores["mmlu"].metric == "mmlu acc"


def test_the_limit_is_for_each_benchmark(made_up: TaskManager) -> None:
    """Every subject of MMLU is asked as much, so it may be a few questions more."""
    assert [BY_KEY["mmlu"].limit_of_task(limit) for limit in (1, 57, 58, 114)] == [1, 1, 2, 2]
    assert score("mmlu", made_up, 58).n_questions == 2 * 57
    assert score("hellaswag", made_up, 58).n_questions == 3
    few = score("hellaswag", made_up, 2)
    assert (few.n_questions, few.accuracy) == (2, 0.5)


def test_lm_eval_has_as_many_tasks_for_mmlu_as_we_say() -> None:
    assert len(subjects()) == BY_KEY["mmlu"].n_tasks


def test_a_metric_that_lm_eval_does_not_give_is_told() -> None:
    results = {"results": {"hellaswag": {"acc_norm,none": 0.5}}, "n-samples": {}}
    with pytest.raises(ValueError, match="lm-eval gives no 'acc,none' for hellaswag"):
        read_score(results, BY_KEY["hellaswag"], "validation")


def test_every_benchmark_asks_the_hub_for_a_data_set_we_know() -> None:
    tasks = lm_evals_tasks()
    for benchmark in BENCHMARKS:
        task = "mmlu_anatomy" if benchmark.key == "mmlu" else benchmark.task
        cfg = tasks._factory._load_full_config(tasks.task_index[task])
        assert cfg["dataset_path"] == HUB[benchmark.key][0]
        asks_test = cfg.get("test_split") is not None
        assert (cfg["test_split"] if asks_test else cfg["validation_split"]) == benchmark.split


@pytest.mark.long
def test_among_all_of_lm_evals_tasks_ours_are_the_same_and_are_replaced(tmp_path: Path) -> None:
    """In this file only those are read that we ask."""
    files = write_questions(tmp_path / "files", subjects=subjects())
    all_tasks = TaskManager().task_index
    for name, entry in lm_evals_tasks().task_index.items():
        assert all_tasks[name].yaml_path == entry.yaml_path
    ours = local_tasks(files, tmp_path / "tasks").task_index
    replaced = TaskManager(include_path=tmp_path / "tasks").task_index
    for name, entry in ours.items():
        assert replaced[name].yaml_path == entry.yaml_path


def test_the_task_files_that_are_included_are_those_of_the_tasks() -> None:
    for key, source in SOURCES.items():
        files = {
            lm_evals_tasks().task_index[path.stem].yaml_path
            for path in lm_eval_tasks().glob(source.tasks)
        }
        assert files == set(lm_eval_tasks().glob(source.tasks))
        assert len(files) == BY_KEY[key].n_tasks
