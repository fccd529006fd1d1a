"""From ``parallelism.partition`` in a file to the stages of the pipeline."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.helpers.debug_model import N_LAYERS, toml_text
from timelyfreeze.schedule import build_dag, gpipe_order
from timelyfreeze.whatif.bounds_file import PipelineMetadata, bounds_file_text
from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.times import StageTimes, bounds_from_times
from torchtitan.freezing.checks import ConfigError, check
from torchtitan.freezing.estimate import main as estimate
from torchtitan.freezing.launch import read_config
from torchtitan.freezing.memory.estimate import estimate_memory
from torchtitan.freezing.partition.cut import part_parameters, partition_line
from torchtitan.settings import JobConfig, count_layers, modules_of_split, stage_modules

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
PARTITION = "--parallelism.partition"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(toml_text())
    return path


def read(path: Path, *arguments: str) -> JobConfig:
    return read_config([f"--job.config_file={path}", *arguments])


def layers_of(job_config: JobConfig) -> tuple[int, ...]:
    modules = job_config.parallelism.module_fqns_per_model_part
    assert modules is not None
    return count_layers(modules)


def all_splits(n_stages: int) -> Iterator[Split]:
    for split in itertools.product(range(N_LAYERS + 1), repeat=n_stages):
        if sum(split) == N_LAYERS and min(split[1:-1], default=1) >= 1:
            yield split


def profile(path: Path, *stages: StageTimes, **notes: Any) -> Path:
    dag = build_dag(gpipe_order(len(stages), 4))
    path.write_text(
        bounds_file_text(dag, bounds_from_times(dag, stages), PipelineMetadata(**notes))
    )
    return path


def times(total_ms: float) -> StageTimes:
    """A third of it forward."""
    third = total_ms / 3
    return StageTimes(third, 2 * third, third, third, third, 0.0)


def test_on_the_command_line_a_partition_takes_the_place_of_the_files_cut() -> None:
    """As in the default configuration, whose file has a cut of its own."""
    path = ROOT / "train_configs/tiny_8m.toml"
    job_config = read_config([f"--job.config_file={path}", "--parallelism.partition=parameters"])
    assert job_config.parallelism.module_fqns_per_model_part is not None
    less = "--parallelism.pipeline_parallel_last_stage_less_layers=2"
    with pytest.raises(ConfigError, match="last_stage_less_layers is given, and parallelism"):
        read_config([f"--job.config_file={path}", "--parallelism.partition=parameters", less])


def test_a_files_cut_need_not_suit_the_stages_of_a_partition() -> None:
    """Eight layers fewer than others in the last stage, where others have four."""
    path = ROOT / "train_configs/smollm2_alpaca_gpt4.toml"
    zero_bubble, partition = f"{SCHEDULE}=ZBVZeroBubble", f"{PARTITION}=parameters"
    cut = read_config([f"--job.config_file={path}", zero_bubble, partition])
    assert layers_of(cut) == (0, 5, 5, 5, 5, 5, 5, 0)  # embedding and head have as many as 8


def test_layers_stand_in_order_between_the_ends_of_the_model() -> None:
    assert modules_of_split((1, 2, 0)) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["norm", "output"],
    ]


def test_without_a_partition_upstream_cuts(toml: Path) -> None:
    job_config = read(toml)
    assert job_config.parallelism.module_fqns_per_model_part is None
    assert count_layers(stage_modules(job_config, N_LAYERS)) == (2, 3, 1)
    assert partition_line(job_config) is None


def test_parameters_by_hand(toml: Path) -> None:
    """A layer has 852,480, the embedding 524,288, norm and head 524,544."""
    # 2.23 million at the ends; with a layer less at one of them the middle would have 2.56.
    assert layers_of(read(toml, f"{PARTITION}=parameters")) == (2, 2, 2)
    wide = read(toml, f"{PARTITION}=parameters", "--model.vocab_size=16384")
    # 4.19 million at each end: with all six layers the middle has 5.11, with five an end has 5.05.
    assert layers_of(wide) == (1, 5, 0)
    check(wide)


def test_layers_that_differ_are_cut_by_what_each_has(toml: Path) -> None:
    """Every other layer of a llama4 has experts."""
    job_config = read(toml, f"{PARTITION}=parameters", "--model.name=llama4")
    parts = part_parameters(job_config)
    assert set(parts.layers) == {852_480, 3_803_648}

    def largest(split: Split) -> int:
        ends = list(itertools.accumulate(split))
        return max(sum(parts.units[end - n : end]) for n, end in zip(split, ends, strict=True))

    # An end without layers would have but the embedding or the head.
    with_layers = [split for split in all_splits(3) if min(split) >= 1]
    assert largest(layers_of(job_config)) == min(map(largest, with_layers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "degree", "n_stages"),
    [("GPipe", 3, 3), ("1F1B", 3, 3), ("Interleaved1F1B", 2, 4), ("ZBVZeroBubble", 2, 4)],
)
def test_no_split_has_a_smaller_rank_than_that_by_memory(
    toml: Path, schedule: str, degree: int, n_stages: int
) -> None:
    keys = [f"{SCHEDULE}={schedule}", f"--parallelism.pipeline_parallel_degree={degree}"]
    job_config = read(toml, f"{PARTITION}=memory", *keys)

    def fullest(split: Split) -> int:
        job_config.parallelism.module_fqns_per_model_part = modules_of_split(split)
        return max(rank.total for rank in estimate_memory(job_config))

    found = layers_of(job_config)
    assert len(found) == n_stages
    assert fullest(found) == min(map(fullest, all_splits(n_stages)))


def test_an_emulation_is_cut_as_what_it_emulates(toml: Path) -> None:
    keys = [f"{PARTITION}=memory", f"{SCHEDULE}=GPipe"]
    assert layers_of(read(toml, *keys, "--emulation.enable")) == layers_of(read(toml, *keys))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper_llama3_2_1b", "paper_llama3_8b"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_the_papers_models_need_smaller_devices(name: str, schedule: str) -> None:
    path = ROOT / "train_configs" / f"{name}.toml"
    default = read(path, f"{SCHEDULE}={schedule}")
    by_memory = read(path, f"{SCHEDULE}={schedule}", f"{PARTITION}=memory")
    before, after = (
        max(rank.total for rank in estimate_memory(each)) for each in (default, by_memory)
    )
    # Under GPipe the activations of 8 microbatches weigh more than where the model is cut.
    assert after < (0.99 if schedule == "GPipe" else 0.91) * before


def test_estimate_tells_the_cut(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate([str(toml), "--", f"{PARTITION}=parameters", "--model.vocab_size=16384"]) == 0
    text = capsys.readouterr().out
    # 4,194,304 + 852,480; 5 x 852,480; 4,194,304 + 256.
    told = (
        "parallelism.partition = 'parameters': layers 1,5,0; parameters of each rank 5.047 4.262 "
        "4.195 million, largest over mean 1.12; memory of each rank "
    )
    assert told in text
    rows = [line.split("|")[-2].strip() for line in text.splitlines() if "| rank" in line]
    memory = re.search(r"memory of each rank ([\d. ]+) GiB", text)
    assert memory is not None
    assert [f"{float(value):.2f}" for value in memory[1].split()] == rows


def test_time_by_hand(toml: Path, tmp_path: Path) -> None:
    """3 ms a layer, 1 ms of the embedding, 9 ms of the head."""
    stages = [times(7.0), times(6.0), times(15.0)]
    path = profile(tmp_path / "bounds.json", *stages, layers=(2, 2, 2))
    job_config = read(toml, f"{PARTITION}=time", f"--parallelism.partition_profile={path}")
    # 10 ms, 9 ms and 9 ms: with one more in the middle 12.
    assert layers_of(job_config) == (3, 3, 0)
    told = partition_line(job_config)
    assert told is not None
    assert (
        "layers 3,3,0; forward and backward of each rank 10 9 9 ms, largest over mean 1.07; "
        "parameters of each rank " in told
    )
    # Two ranks with two stages each: 13 and 15 ms.
    looped = read(
        toml,
        f"{PARTITION}=time",
        f"--parallelism.partition_profile={path}",
        f"{SCHEDULE}=Interleaved1F1B",
        "--parallelism.pipeline_parallel_degree=2",
    )
    split = layers_of(looped)
    assert (split[0] + split[2], split[1] + split[3]) == (4, 2)


def test_the_command_line_can_do_without_the_partition_of_a_file(toml: Path) -> None:
    toml.write_text(toml_text(parallelism__partition="time"))
    with pytest.raises(ConfigError, match=r"which needs parallelism\.partition_profile"):
        read(toml)
    job_config = read(toml, f"{PARTITION}=")
    assert job_config.parallelism.module_fqns_per_model_part is None


def test_loads_that_are_not_known_are_left_out(toml: Path) -> None:
    job_config = read(toml, f"{PARTITION}=parameters", "--parallelism.data_parallel_shard_degree=2")
    told = partition_line(job_config)
    assert told is not None
    assert "parameters of each rank 2.229 1.705 2.23 million" in told
    assert "memory" not in told
    assert "forward" not in told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, r"partition_profile is '.*': .* cannot be read: No such file"),
        ("{}", r'partition_profile is .*: no bounds file, for it has no object "bounds"'),
        ("no layers", "it does not say how many layers a stage has"),
        ("others", r"whose model has 9 layers; model.flavor 'debugmodel' has 6"),
        ("ends", "2 stages with 3,3 layers do not tell what a layer takes"),
    ],
)
def test_a_profile_that_does_not_tell_is_refused(
    toml: Path, tmp_path: Path, text: str | None, expected: str
) -> None:
    path = tmp_path / "bounds.json"
    middle = times(6.0)
    if text == "no layers":
        profile(path, middle, middle, middle)
    elif text == "others":
        profile(path, middle, middle, middle, layers=(3, 3, 3))
    elif text == "ends":
        profile(path, middle, middle, layers=(3, 3))
    elif text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as error:
        read(toml, f"{PARTITION}=time", f"--parallelism.partition_profile={path}")
    assert str(error.value).startswith("The configuration has an error:\n  - parallelism.partition")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"file": "nosuch.json"}, "partition_profile is 'nosuch.json': .* cannot be read"),
        ({"layers": (2, 3, 2)}, "whose model has 7 layers; model.flavor 'debugmodel' has 6"),
        ({"keys": ["--model.name=llama4"]}, "and the layers of model.flavor 'debugmodel' differ"),
        (
            {"keys": ["--activation_checkpoint.mode=selective"]},
            "memory is estimated, and activation_checkpoint.mode is 'selective'; the estimate is",
        ),
    ],
)
def test_an_elastic_run_by_time_is_refused_without_times_or_memory(
    toml: Path, tmp_path: Path, change: dict[str, Any], expected: str | None
) -> None:
    layers = change.get("layers", (2, 2, 2))
    file = profile(tmp_path / "bounds.json", times(7.0), times(6.0), times(15.0), layers=layers)
    arguments = [
        "--freezing.method=fixed",
        "--freezing.elastic.enable",
        "--freezing.elastic.partition=time",
        f"--parallelism.partition_profile={change.get('file', file)}",
        *change.get("keys", ()),
    ]
    if expected is None:
        check(read(toml, *arguments, "--training.dataset=alpaca"))
        return
    with pytest.raises(ConfigError, match=expected):
        read(toml, *arguments)
    read(toml, *arguments, "--freezing.method=none")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model.name=qwen3", "--model.flavor=0.6B"], "model.name is 'qwen3', whose layers"),
        (["--model.name=nosuch"], "model.name is 'nosuch'"),
        (["--model.flavor=9B"], "model.flavor is '9B'"),
        (
            ["--model.name=llama4", f"{SCHEDULE}=Interleaved1F1B"],
            "a rank has 2 stages, and the layers of the model differ",
        ),
        ([f"{SCHEDULE}=2F2B"], "pipeline_parallel_schedule is '2F2B'"),
        (["--parallelism.pipeline_parallel_degree=9"], "6 layers cannot be cut into 9 stages"),
        (["--parallelism.pipeline_parallel_microbatch_size=3"], "training.local_batch_size is 8"),
        (
            [f"{PARTITION}=memory", "--parallelism.tensor_parallel_degree=2"],
            "parallelism.tensor_parallel_degree is 2; the estimate is for pipeline parallelism",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_when_it_is_read(
    toml: Path, arguments: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read(toml, f"{PARTITION}=parameters", *arguments)


def test_a_contradicting_key_is_refused(toml: Path) -> None:
    with pytest.raises(ConfigError, match="last_stage_less_layers is given, and"):
        read(
            toml, f"{PARTITION}=memory", "--parallelism.pipeline_parallel_last_stage_less_layers=1"
        )
    cut: dict[str, Any] = {"parallelism__module_fqns_per_model_part": modules_of_split((2, 2, 2))}
    toml.write_text(toml_text(**cut))
    assert layers_of(read(toml)) == (2, 2, 2)
    toml.write_text(toml_text(**cut, parallelism__partition="memory"))
    with pytest.raises(ConfigError, match="module_fqns_per_model_part is given, and"):
        read(toml)
