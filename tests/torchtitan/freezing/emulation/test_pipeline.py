"""A pipeline built in one process: upstream's stages, the schedule's order, the ranks' weights."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part, pipeline_llm
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from tests.timelyfreeze.helpers.stages import sum_loss
from tests.torchtitan.helpers.job_configs import config
from timelyfreeze.control.emulated import merge_ranks
from timelyfreeze.runtime.torch_pipelining import named_order, read_order, stages_of
from timelyfreeze.schedule.order import one_f_one_b_order, order_to_csv
from torchtitan.freezing.emulation.pipeline import (
    EmulatedDims,
    as_one_process,
    build_emulated_pipeline,
    parts_of_ranks,
)
from torchtitan.settings import pipeline_order

pytestmark = pytest.mark.usefixtures("one_rank")

ARGS = TransformerModelArgs(dim=16, n_layers=8, n_heads=2, vocab_size=32)
STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
SEED = 7


def build(**changes: Any) -> tuple[Any, list[nn.Module], EmulatedDims]:
    """Schedule, modules on the meta device, and dimensions."""
    job_config = config(emulation__enable=True, **changes)
    ones = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    dims = EmulatedDims.of(ParallelDims(**ones, world_size=1))
    with torch.device("meta"):
        model = Transformer(ARGS)
    schedule, parts, has_first, has_last = build_emulated_pipeline(
        pipeline_llm,
        model,
        dims,
        job_config,
        torch.device("cpu"),
        ARGS,
        lambda part, *_: part,
        sum_loss,
    )
    assert has_first
    assert has_last
    return schedule, parts, dims


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("name", STAGES_PER_RANK)
def test_the_model_is_cut_as_upstream_cuts_it_and_runs_in_the_merged_order(
    name: str, n_ranks: int
) -> None:
    schedule, parts, _ = build(
        parallelism__pipeline_parallel_schedule=name, parallelism__pipeline_parallel_degree=n_ranks
    )
    n_stages = n_ranks * STAGES_PER_RANK[name]
    assert [stage.stage_index for stage in stages_of(schedule)] == list(range(n_stages))
    wanted = generate_llm_fqn_per_model_part(n_stages, ARGS.n_layers)
    for part, names in zip(parts, wanted, strict=True):
        modules = {n.split(".")[0] for n in names} | {n for n in names if n.startswith("layers.")}
        for module, _ in part.named_parameters():
            first, second = module.split(".")[:2]
            assert f"{first}.{second}" in modules if first == "layers" else first in modules
    order = named_order(name, n_ranks, 8, stages_per_rank=STAGES_PER_RANK[name])
    assert read_order(schedule).ranks == (merge_ranks(order),)


def test_a_csv_schedule_is_emulated(tmp_path: Any) -> None:
    path = tmp_path / "schedule.csv"
    order = one_f_one_b_order(2, 8)
    path.write_text(order_to_csv(order))
    schedule, parts, _ = build(
        parallelism__pipeline_parallel_schedule="PipelineScheduleSingle",
        parallelism__pipeline_parallel_schedule_csv=str(path),
        parallelism__pipeline_parallel_degree=2,
    )
    assert len(parts) == 2
    assert read_order(schedule).ranks == (merge_ranks(order),)


@torch.no_grad()
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_weights_begin_as_those_of_seeded_ranks(name: str) -> None:
    """Upstream seeds rank r with the seed plus r, and a rank draws stage after stage."""
    settings = {
        "parallelism__pipeline_parallel_schedule": name,
        "parallelism__pipeline_parallel_degree": 2,
    }
    _, parts, _ = build(**settings, debug__seed=SEED)
    _, unseeded, _ = build(**settings)
    order = pipeline_order(config(**settings), ARGS.n_layers)
    wanted: dict[str, torch.Tensor] = {}
    for rank, mine in enumerate(parts_of_ranks(unseeded, order.stage_to_rank)):
        torch.manual_seed(SEED + rank)
        for part in mine:
            part.to_empty(device="cpu")
            part.init_weights(buffer_device=None)  # type: ignore[operator]
            wanted.update(copy.deepcopy(dict(part.named_parameters())))
    state = torch.get_rng_state()
    got: dict[str, torch.Tensor] = {}
    for part in parts:
        part.to_empty(device="cpu")
        part.init_weights(buffer_device=None)  # type: ignore[operator]
        got.update(part.named_parameters())
    assert torch.equal(torch.get_rng_state(), state), "the process draws on as if nothing had been"
    assert got.keys() == wanted.keys()
    assert [name for name in got if not torch.equal(got[name], wanted[name])] == []


def test_the_mesh_knows_which_parameters_each_rank_would_have() -> None:
    _, parts, dims = build(
        parallelism__pipeline_parallel_schedule="ZBVZeroBubble",
        parallelism__pipeline_parallel_degree=2,
    )
    assert dims.pipeline._ranks == [[parts[0], parts[3]], [parts[1], parts[2]]]


def test_upstream_is_told_of_one_process_only_meanwhile() -> None:
    job_config = config()
    with as_one_process(job_config):
        assert job_config.parallelism.pipeline_parallel_degree == 1
        assert job_config.parallelism.pipeline_parallel_schedule == "1F1B"
    assert job_config.parallelism.pipeline_parallel_degree == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pipeline_parallel_layers_per_stage": 2},
            r"cut into 5 stages, which parallelism\.pipeline_parallel_degree \(4\) must divide",
        ),
        (
            {"pipeline_parallel_layers_per_stage": 3, "pipeline_parallel_degree": 2},
            r"cut into 4 stages and the schedule \(1F1B\) has 2",
        ),
    ],
    ids=str,
)
def test_stages_that_do_not_fit_the_schedule_are_refused(
    changes: dict[str, int], message: str
) -> None:
    job_config = config(**{f"parallelism__{key}": value for key, value in changes.items()})
    with pytest.raises(ValueError, match=message):
        pipeline_order(job_config, ARGS.n_layers)


def test_layers_per_stage_are_heeded() -> None:
    """Eight layers and two ends of one each: five stages of two."""
    job_config = config(
        parallelism__pipeline_parallel_layers_per_stage=2, parallelism__pipeline_parallel_degree=5
    )
    assert pipeline_order(job_config, ARGS.n_layers).n_stages == 5
