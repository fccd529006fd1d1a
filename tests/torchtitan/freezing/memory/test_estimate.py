"""Memory told from a configuration, against sums by hand and against what really lies in memory."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.models.llama3 import Transformer, llama3_args

from tests.torchtitan.helpers.job_configs import make_job_config
from timelyfreeze.policies.apf import Apf
from timelyfreeze.runtime.meters import ChangeMeter
from timelyfreeze.whatif.rank_memory import RESERVE_BYTES, peak_bytes
from torchtitan.freezing.memory.estimate import How, decoder_bytes, estimate_memory
from torchtitan.hf.decoder import Decoder
from torchtitan.hf.flavors import LLAMA_FLAVORS, chosen_args
from torchtitan.settings.job_config import JobConfig
from torchtitan.settings.layout import pipeline_order, stage_modules

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
GIB = 1024**3
PIPELINES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


def config(flavor: str = "8M", **changes: Any) -> JobConfig:
    values = {
        "model__name": "llama3",
        "model__flavor": flavor,
        "training__seq_len": 128,
        "training__local_batch_size": 16,
        "training__mixed_precision_param": "float32",
        "parallelism__pipeline_parallel_degree": 4,
        "parallelism__pipeline_parallel_microbatch_size": 2,
        "parallelism__pipeline_parallel_schedule": "1F1B",
        "activation_checkpoint__mode": "none",
        **changes,
    }
    return make_job_config(**values)


# -- activations -----------------------------------------------------------------------------------


def kept(dtype: torch.dtype, autocast: torch.dtype | None, **more: Any) -> Any:
    args = chosen_args(config(), llama3_args)
    return decoder_bytes(args, how=How(2, dtype, autocast, **more), seq_len=128)


# The 8M model: width, width of keys and values together, feed-forward, heads, vocabulary, tokens.
D, KV, FF, H, V, T = 256, 128, 768, 8, 2048, 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_keeps_what_its_backward_reads(dtype: torch.dtype) -> None:
    """Input, normed input, q, attention's output, residual, normed residual: six widths; k and v;
    gate, its SiLU, up and their product; a number per row for each norm, per row and head for
    attention.
    """
    wide = T * (6 * D + 2 * KV + 4 * FF) * dtype.itemsize
    assert kept(dtype, None).layer.kept == wide + 4 * T * (2 + H)


def test_in_16_bits_layers_of_one_input_keep_it_once() -> None:
    """Input, normed input, q, attention's output, residual, normed residual; k and v; gate and up
    side by side, and their product. Copies of weights are not among what a microbatch keeps.
    """
    expected = 2 * T * (6 * D + 2 * KV + 3 * FF) + 4 * T * (2 + H)
    assert kept(torch.float32, torch.bfloat16).layer.kept == expected


def test_a_layer_of_8b_keeps_at_most_172_kib_a_token() -> None:
    args = chosen_args(config("8B"), llama3_args)
    counted = decoder_bytes(args, how=How(1, torch.float32, torch.bfloat16), seq_len=64)
    assert counted.layer.kept <= 64 * 172 * 1024
    assert counted.message == 64 * 2 * 4096


def test_the_head_keeps_logits_and_their_logarithms() -> None:
    # Input, normed input, a number per row; logits, log-softmax, and cross entropy's total weight.
    expected = T * (2 * D + 1) * 4 + 2 * T * V * 4
    assert abs(kept(torch.float32, None).head.kept - expected) <= 8 * T + 64
    assert kept(torch.float32, None).logits == T * V * 4


def test_a_real_forward_keeps_as_much() -> None:
    """On a CPU the plain norm keeps more than the fused one, so only the rest is compared."""
    args = chosen_args(config(), llama3_args)
    args.n_layers, args.max_seq_len = 3, 128
    model = Transformer(args)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: dict[int, int] = {}
    held = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.dtype == torch.float32:
            alive[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    tokens = torch.zeros(2, 128, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(tokens)
    estimate = 3 * kept(torch.float32, None).layer.kept
    assert sum(alive.values()) > 0.8 * estimate
    assert sum(alive.values()) < 2.5 * estimate


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_beside_frozen_weights_adapters_alone_have_gradients(autocast: torch.dtype | None) -> None:
    pytest.importorskip("peft", reason="peft is not installed: the extra lora has it")
    rank, n_layers = 4, 10
    precision = "float32" if autocast is None else "bfloat16"
    changes = {"freezing__method": "lora", "lora__rank": rank}
    (memory,) = estimate_memory(
        config(**changes, training__mixed_precision_param=precision, emulation__enable=True)
    )
    # Four projections of the attention, three of the feed-forward: rank times in and out.
    widths = 2 * (D + D) + 2 * (D + KV) + 3 * (D + FF)
    adapters = n_layers * rank * widths
    assert memory.gradients == 4 * adapters
    assert memory.optimizer == 8 * adapters
    linear = n_layers * (2 * D * D + 2 * D * KV + 3 * D * FF) + V * D
    others = V * D + (2 * n_layers + 1) * D
    # Under autocast frozen linear layers are of its type, and adapters are cast once.
    own = 4 if autocast is None else 2
    assert memory.parameters == own * linear + 4 * (others + adapters)
    assert memory.casts == (0 if autocast is None else 2 * adapters)


def test_of_adapters_first_the_larger_half_counts() -> None:
    pytest.importorskip("peft", reason="peft is not installed: the extra lora has it")
    first = {"lora__until": 48, "lora__rank": 4}
    assert estimate_memory(config(**first)) == estimate_memory(config())
    adapters = estimate_memory(config(freezing__method="lora", lora__rank=4))
    assert all(a.total < b.total for a, b in zip(adapters, estimate_memory(config()), strict=True))


def test_recomputed_blocks_keep_their_input_alone() -> None:
    full = kept(torch.float32, None, recompute=True)
    assert full.layer.kept == T * D * 4
    assert full.recomputed == kept(torch.float32, None).layer.kept


# -- how much at once ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "in_flight"), [("GPipe", [8, 8, 8, 8]), ("1F1B", [4, 3, 2, 1])]
)
def test_microbatches_in_flight_are_those_of_the_schedule(
    schedule: str, in_flight: list[int]
) -> None:
    order = pipeline_order(config(parallelism__pipeline_parallel_schedule=schedule), 10)
    assert [peak_bytes(row, lambda s: 1, lambda s: 0) for row in order.ranks] == in_flight


# -- a whole run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_stages", "max_gib"), [(4, 26.4), (8, 17.2)])
def test_a_stage_of_the_8b_model_fits_alone(n_stages: int, max_gib: float) -> None:
    """What the profile holds at once: one stage, one microbatch, and no optimizer."""
    stages = estimate_memory(
        config(
            "Llama-3-8B",
            training__seq_len=1024,
            training__local_batch_size=2,
            training__mixed_precision_param="bfloat16",
            parallelism__pipeline_parallel_schedule="GPipe",
            parallelism__pipeline_parallel_degree=n_stages,
        )
    )
    alone = [stage.total - stage.optimizer for stage in stages]
    assert max(alone) / GIB == pytest.approx(max_gib, abs=0.1)
    assert max(alone) + RESERVE_BYTES < 40e9


@pytest.mark.parametrize("schedule", PIPELINES)
def test_an_emulation_holds_what_all_ranks_hold(schedule: str) -> None:
    changes = {"parallelism__pipeline_parallel_schedule": schedule}
    ranks = estimate_memory(config(**changes))
    (one,) = estimate_memory(config(**changes, emulation__enable=True))
    for part in ("parameters", "gradients", "optimizer", "casts", "messages"):
        assert getattr(one, part) == sum(getattr(rank, part) for rank in ranks), part
    assert one.scratch == max(rank.scratch for rank in ranks)
    together = sum(rank.activations for rank in ranks)
    assert max(rank.activations for rank in ranks) < one.activations <= together
    if schedule == "GPipe":
        assert one.activations == together, "every forward comes before the first backward"


@pytest.mark.parametrize("schedule", PIPELINES)
def test_ranks_fraction_all_parameters(schedule: str) -> None:
    job_config = config(parallelism__pipeline_parallel_schedule=schedule)
    ranks = estimate_memory(job_config)
    args = chosen_args(job_config, llama3_args)
    with torch.device("meta"):
        n_bytes = sum(p.nbytes for p in Transformer(args).parameters())
    assert len(ranks) == 4
    assert sum(rank.parameters for rank in ranks) == n_bytes
    assert all(rank.gradients == rank.parameters for rank in ranks)
    assert all(rank.optimizer == 2 * rank.parameters for rank in ranks)
    assert all(rank.activations > 0 for rank in ranks)


def test_parameters_and_adam_are_what_really_lies_in_memory() -> None:
    (rank,) = estimate_memory(config(parallelism__pipeline_parallel_degree=1))
    args = chosen_args(config(), llama3_args)
    args.max_seq_len = 8
    model = Transformer(args)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    state = sum(
        value.nbytes
        for values in optimizer.state.values()
        for value in values.values()
        if value.dim()
    )
    assert rank.parameters == sum(p.nbytes for p in model.parameters())
    assert rank.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert rank.optimizer == state


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("apf", {}), ("timelyfreeze+apf", {"freezing__score_dtype": "bfloat16"}),
        ("apf", {"freezing__apf": Apf(reduction="share")}), ("autofreeze", {}), ("fixed", {}),
        ("apf", {"freezing__score_memory": "host"}), ("timelyfreeze", {}),
    ],
)  # fmt: skip
def test_vectors_of_scores_are_those_that_a_policy_keeps(
    method: str, settings: dict[str, Any]
) -> None:
    run = config(parallelism__pipeline_parallel_degree=1, freezing__method=method, **settings)
    (rank,) = estimate_memory(run)
    model = Transformer(chosen_args(config(), llama3_args))
    freezing = run.freezing
    name = method.removeprefix("timelyfreeze").removeprefix("+")
    measurement = getattr(freezing, name).measurement if name else None
    kept = 0
    if measurement is not None and freezing.score_memory == "device":
        dtype = getattr(torch, freezing.score_dtype)
        kept = ChangeMeter([*model.named_parameters()], measurement, dtype=dtype).n_bytes
    assert rank.scores == kept
    assert (kept > 0) == (name in ("apf", "autofreeze") and freezing.score_memory == "device")


def test_weights_are_cast_once_however_many_microbatches_there_are() -> None:
    """All ranks together hold each linear layer's weights once in bfloat16."""
    of_a_block = 2 * (D * D + D * KV) + 3 * D * FF
    for n_rows in (4, 32):
        ranks = estimate_memory(
            config(
                training__mixed_precision_param="bfloat16",
                training__local_batch_size=n_rows,
                parallelism__pipeline_parallel_schedule="GPipe",
            )
        )
        assert sum(rank.casts for rank in ranks) == 2 * (10 * of_a_block + V * D)
    assert all(rank.casts == 0 for rank in estimate_memory(config()))


def test_bfloat16_halves_what_belongs_to_parameters() -> None:
    full = estimate_memory(config())
    half = estimate_memory(config(training__dtype="bfloat16"))
    for left, right in zip(full, half, strict=True):
        assert (left.parameters, left.optimizer) == (2 * right.parameters, 2 * right.optimizer)
        assert right.activations < left.activations


def test_gpipe_holds_more_than_1f1b() -> None:
    gpipe = estimate_memory(config(parallelism__pipeline_parallel_schedule="GPipe"))
    one = estimate_memory(config())
    assert all(a.activations > b.activations for a, b in zip(gpipe, one, strict=True))
    assert gpipe[0].activations == 2 * one[0].activations
    assert gpipe[3].activations == 8 * one[3].activations


def test_stages_are_cut_as_upstream_cuts_them() -> None:
    stages = stage_modules(config(), 10)
    assert stages[0] == ["tok_embeddings", "layers.0", "layers.1"]
    assert stages[3] == ["layers.8", "layers.9", "norm", "output"]
    own = [["tok_embeddings", *(f"layers.{i}" for i in range(9))], ["layers.9", "norm", "output"]]
    job_config = config(
        parallelism__pipeline_parallel_degree=2, parallelism__module_fqns_per_model_part=own
    )
    first, last = estimate_memory(job_config)
    assert first.parameters > last.parameters
    per_stage = config(
        parallelism__pipeline_parallel_schedule="Interleaved1F1B",
        parallelism__pipeline_parallel_layers_per_stage=1,
    )
    assert len(stage_modules(per_stage, 10)) == 12
    assert len(estimate_memory(per_stage)) == 4


def test_a_schedule_of_ones_own_is_gone_through(tmp_path: Path) -> None:
    rows = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
    path = tmp_path / "own.csv"
    path.write_text("\n".join(rows))
    changes = {
        "parallelism__pipeline_parallel_degree": 2,
        "training__local_batch_size": 4,
        "parallelism__pipeline_parallel_schedule_csv": str(path),
        "parallelism__pipeline_parallel_schedule": "PipelineScheduleSingle",
    }
    own = estimate_memory(config(**changes))
    changes.pop("parallelism__pipeline_parallel_schedule_csv")
    assert own == estimate_memory(
        config(**{**changes, "parallelism__pipeline_parallel_schedule": "1F1B"})
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallelism__tensor_parallel_degree": 2}, "tensor_parallel_degree is 2"),
        ({"parallelism__data_parallel_shard_degree": 4}, "data_parallel_shard_degree is 4"),
        ({"model__name": "qwen3"}, "model.name is 'qwen3'"),
        ({"activation_checkpoint__mode": "selective"}, "activation_checkpoint.mode is 'selective'"),
        ({"training__local_batch_size": 15}, "local_batch_size is 15"),
        ({"training__local_batch_size": 4}, "number of microbatches is 2"),
        ({"model__flavor": "9B"}, "model.flavor is '9B'"),
        ({"parallelism__pipeline_parallel_schedule": "2F2B"}, "'2F2B'; known: GPipe"),
    ],
)
def test_what_is_not_covered_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="is") as error:
        estimate_memory(config(**changes))
    assert words in str(error.value)


@pytest.mark.parametrize("name", LLAMA_FLAVORS)
def test_large_models_are_estimated_in_a_moment(name: str) -> None:
    ranks = estimate_memory(config(name, training__seq_len=1024, training__dtype="bfloat16"))
    with torch.device("meta"):
        model = Decoder(chosen_args(config(name), {}))
    n_parameters = sum(p.numel() for p in model.parameters())
    assert sum(rank.total for rank in ranks) > 8 * n_parameters


def fits(flavor: str, device_gib: float, **changes: Any) -> bool:
    settings = {"training__seq_len": 1024, "training__local_batch_size": 8}
    settings["parallelism__pipeline_parallel_microbatch_size"] = 1
    ranks = estimate_memory(config(flavor, **{**settings, **changes}))
    return all(rank.fits(device_gib * GIB) for rank in ranks)


def test_what_fits_where_follows_from_bytes_per_parameter() -> None:
    """Adam in float32 takes 16 bytes a parameter: 52 GB a rank for 13B, 4 GB for 1B over 4."""
    assert fits("Llama-3.2-1B", 48.0)
    assert not fits("Llama-2-13B", 48.0)
    assert fits("Llama-2-13B", 140.0)
    assert fits("Llama-2-13B", 48.0, training__dtype="bfloat16")
    assert fits("Llama-3-8B", 140.0, parallelism__pipeline_parallel_schedule="GPipe")


def measured_peaks(*n_rows: int) -> list[int]:
    """Peaks of a fresh process, whose allocator has not grown for something else before."""
    script = str(ROOT / "tests/torchtitan/helpers/memory_peak.py")
    done = subprocess.run(
        [sys.executable, script, "128", *map(str, n_rows)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return [int(word) for word in done.stdout.splitlines()[-1].split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peaks")
def test_a_larger_batch_takes_as_much_more_as_estimated() -> None:
    """A CPU keeps more than a GPU's fused norm and attention do: 1.3 times was measured."""
    small, large = (
        estimate_memory(
            config(parallelism__pipeline_parallel_degree=1, training__local_batch_size=n)
        )[0].total
        for n in (4, 20)
    )
    first, then = measured_peaks(4, 20)
    assert 0.95 < (then - first) / (large - small) < 1.6
