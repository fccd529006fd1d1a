"""Image classifiers cut by ``parallelism.partition``: blocks of a ConvNeXt differ in size."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from timelyfreeze.cli.plan import main as plan_main
from timelyfreeze.schedule import build_dag, one_f_one_b_order
from timelyfreeze.whatif.bounds_file import PipelineMetadata, bounds_file_text
from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.times import StageTimes, bounds_from_times
from torchtitan.freezing.checks import ConfigError
from torchtitan.freezing.launch import read_config
from torchtitan.freezing.partition.cut import (
    count_model_layers,
    model_sizes,
    part_parameters,
    partition_line,
)
from torchtitan.settings import JobConfig, count_layers, stage_modules

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[4]
LAYERS = {"vit": 9, "convnextv2": 12}


def read(kind: str, *arguments: str) -> JobConfig:
    path = ROOT / f"train_configs/{kind}_cifar10.toml"
    return read_config([f"--job.config_file={path}", *arguments])


def split_of(job_config: JobConfig) -> Split:
    modules = job_config.parallelism.module_fqns_per_model_part
    assert modules is not None
    return count_layers(modules)


def every_cut(n_layers: int) -> Iterator[tuple[int, int, int]]:
    """First layers of stages 1 to 3; the ends may have none."""
    for cut in itertools.combinations_with_replacement(range(n_layers + 1), 3):
        if cut[0] < cut[1] < cut[2]:
            yield cut


@pytest.mark.parametrize("kind", LAYERS)
def test_no_cut_has_a_smaller_rank_by_parameters(kind: str) -> None:
    """The library's own modules are counted, at every cut there is."""
    job_config = read(kind, "--parallelism.partition=parameters")
    if kind == "vit":
        config = transformers.ViTConfig(
            hidden_size=192, num_hidden_layers=9, num_attention_heads=3, intermediate_size=768,
            patch_size=4, image_size=32, num_labels=10,
        )  # fmt: skip
        model = transformers.ViTForImageClassification(config)
        blocks = [sum(p.numel() for p in block.parameters()) for block in model.vit.layers]
        first = sum(p.numel() for p in model.vit.embeddings.parameters())
    else:
        config = transformers.ConvNextV2Config(
            hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2], patch_size=2, num_labels=10
        )
        model = transformers.ConvNextV2ForImageClassification(config)
        backbone, blocks = model.convnextv2, []
        for stage in backbone.encoder.stages:
            blocks += [sum(p.numel() for p in block.parameters()) for block in stage.layers]
            blocks[-len(stage.layers)] += sum(
                p.numel() for p in stage.downsampling_layer.parameters()
            )
        first = sum(p.numel() for p in backbone.embeddings.parameters())
        assert max(blocks) > 50 * min(blocks)
    last = sum(p.numel() for p in model.parameters()) - first - sum(blocks)

    def largest(cut: tuple[int, int, int]) -> int:
        stages = [sum(blocks[a:b]) for a, b in itertools.pairwise((0, *cut, len(blocks)))]
        return max(first + stages[0], *stages[1:-1], stages[-1] + last)

    ends = list(itertools.accumulate(split_of(job_config)))
    assert ends[-1] == len(blocks) == LAYERS[kind] == count_model_layers(job_config)
    assert largest((ends[0], ends[1], ends[2])) == min(map(largest, every_cut(len(blocks))))
    parts = part_parameters(job_config)
    assert (parts.first, list(parts.layers), parts.last) == (first, blocks, last)


@pytest.mark.slow
def test_the_papers_convnext_is_cut_more_evenly_than_by_the_number_of_blocks() -> None:
    file = f"--job.config_file={ROOT}/train_configs/paper_convnextv2_l.toml"
    job_config = read_config([file, "--parallelism.partition=parameters"])
    units = part_parameters(job_config).units
    by_number = count_layers(stage_modules(read_config([file]), len(units)))

    def largest(split: Split) -> int:
        ends = list(itertools.accumulate(split))
        return max(sum(units[end - n : end]) for n, end in zip(split, ends, strict=True))

    assert sum(by_number) == 36
    assert largest(split_of(job_config)) < 0.65 * largest(by_number)
    told = partition_line(job_config)
    assert told is not None
    assert "layers 16,11,7,2; parameters of each rank" in told


def test_blocks_are_cut_by_the_times_of_a_run(tmp_path: Path) -> None:
    """The bounds of a run with 3 blocks a stage, the second of which takes twice as long."""
    stages = [StageTimes(3.0, 6.0), StageTimes(6.0, 12.0), *[StageTimes(3.0, 6.0)] * 2]
    dag = build_dag(one_f_one_b_order(4, 8))
    path = tmp_path / "bounds.json"
    notes = PipelineMetadata(layers=(3, 3, 3, 3))
    path.write_text(bounds_file_text(dag, bounds_from_times(dag, stages), notes))
    keys = ("--parallelism.partition=time", f"--parallelism.partition_profile={path}")
    job_config = read("convnextv2", *keys)
    # 45 ms in all: 3 a block, 6 in the second stage.
    works = [3.0] * 3 + [6.0] * 3 + [3.0] * 6

    def longest(cut: tuple[int, int, int]) -> float:
        return max(sum(works[a:b]) for a, b in itertools.pairwise((0, *cut, 12)))

    ends = list(itertools.accumulate(split_of(job_config)))
    assert longest((ends[0], ends[1], ends[2])) == min(map(longest, every_cut(12))) == 12.0
    told = partition_line(job_config)
    assert told is not None
    assert "forward and backward of each rank 9 12 12 12 ms" in told


@pytest.mark.parametrize(("kind", "schedule"), [("convnextv2", "GPipe"), ("vit", "1F1B")])
def test_plan_cuts_by_memory_as_a_run_does(kind: str, schedule: str, tmp_path: Path) -> None:
    """From the bounds that a run leaves, whose notes have the sizes of its blocks."""
    keys = [f"--parallelism.pipeline_parallel_schedule={schedule}", "--optimizer.name=AdamW"]
    job_config = read(kind, *keys)
    n_layers = LAYERS[kind]
    dag = build_dag(one_f_one_b_order(4, 8))
    sizes = model_sizes(job_config)
    notes = PipelineMetadata(
        ranks=4,
        layers=count_layers(stage_modules(job_config, n_layers)),
        parameters=sizes.parameters,
        memory=sizes.memory,
    )
    path, plan = tmp_path / "bounds.json", tmp_path / "plan.json"
    stages = [StageTimes(3.0, 6.0)] * 4
    path.write_text(bounds_file_text(dag, bounds_from_times(dag, stages), notes))
    arguments = ["--schedules", schedule, "--splits", "memory", "--r-max", "0.5"]
    assert plan_main([str(path), *arguments, "--json", str(plan)]) == 0
    (case,) = json.loads(plan.read_text())["cases"]
    by_memory = read(kind, *keys, "--parallelism.partition=memory")
    assert tuple(case["layers"]) == split_of(by_memory)
    assert tuple(case["layers"]) != notes.layers, "the default split is another"


def test_blocks_that_differ_are_not_cut_for_several_stages_a_rank() -> None:
    keys = ("--parallelism.pipeline_parallel_schedule=Interleaved1F1B",)
    with pytest.raises(ConfigError, match="a rank has 2 stages, and the layers of the model diff"):
        read("convnextv2", "--parallelism.partition=parameters", *keys,
             "--parallelism.pipeline_parallel_degree=2")  # fmt: skip
