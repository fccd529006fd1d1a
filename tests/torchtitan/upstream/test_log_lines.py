"""Lines of the log and warnings: what upstream says of our runs, and what is told instead."""

import importlib
import importlib.util
import inspect
import math
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torchtitan.components.checkpoint as titan_checkpoint
import torchtitan.components.lr_scheduler as titan_lr
import torchtitan.components.metrics as titan_metrics
import torchtitan.distributed.utils as titan_dist
import torchtitan.tools.utils as titan_tools
from torchtitan.distributed import ParallelDims

from tests.torchtitan.upstream.test_fixes import _installed, fresh  # noqa: F401 - a fixture
from torchtitan.freezing.report.recorder import FreezingMetricsProcessor
from torchtitan.settings.job_config import JobConfig
from torchtitan.upstream import fixes as upstream_fixes


@pytest.mark.parametrize("is_plain", [True, False])
def test_lines_of_a_classifier_count_pictures_where_upstream_still_says_tokens(
    caplog: pytest.LogCaptureFixture, is_plain: bool
) -> None:
    """Guards ``lines_count``: upstream's lines have one name for all that models read."""
    job_config = JobConfig()
    job_config.metrics.disable_color_printing = is_plain
    processor = titan_metrics.MetricsProcessor(job_config, ParallelDims(1, 1, 1, 1, 1, 1, 1, 1))
    processor.num_flops_per_token, processor.gpu_peak_flops = 10, math.nan
    lines = []
    for unit in ("tokens", "images"):
        with caplog.at_level("INFO"), upstream_fixes.lines_count(unit):
            processor.data_loading_times.append(0.1)
            processor.ntokens_since_last_log = 8
            processor.log(3, 0.5, 0.5, 1.0)
            processor.log_validation(0.25, 3)
        lines.append([record.getMessage() for record in caplog.records[-2:]])
    (trained, validated), (pictures, validated_on_pictures) = lines
    assert "tps: " in trained
    assert "tps: " in validated
    for line in (pictures, validated_on_pictures):
        assert "images/s: " in line
        assert "tps" not in line
    assert "mfu" not in pictures + trained


@pytest.mark.parametrize(("counts", "note"), [(False, " without padding"), (True, None)])
def test_lines_say_what_their_throughput_leaves_out(
    caplog: pytest.LogCaptureFixture, counts: bool, note: str
) -> None:
    config = JobConfig()
    config.report.count_padding = counts
    lines = FreezingMetricsProcessor(config, ParallelDims(1, 1, 1, 1, 1, 1, 1, 1))
    lines.num_flops_per_token, lines.data_loading_times = 10, [0.1]
    lines.recorder = MagicMock()
    lines.recorder.log_step.return_value = {}
    with caplog.at_level("INFO"):
        lines.log(3, 0.5, 0.5, 1.0)
        lines.log_validation(0.25, 3)
    found = [re.search(r"tps: 0( without padding)?", line) for line in caplog.messages]
    assert [each and each[1] for each in found] == [note, note]


def test_what_upstream_says_wrongly_of_our_runs_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards ``is_worth_telling`` and ``maybe_enable_amp``."""
    dims = SimpleNamespace(fsdp_enabled=False, tp_enabled=False, pp_enabled=True)
    with caplog.at_level("INFO"):
        fresh(titan_dist).maybe_enable_amp(dims, "bfloat16", "cpu")
        assert "Mixed precision training is disabled" in caplog.text, "upstream still says so"
        caplog.clear()
        titan_dist.maybe_enable_amp(dims, "bfloat16", "cpu")
        titan_tools.GarbageCollection.collect("Initial GC collection")
        titan_dist.logger.info("Using pipeline schedule LoopedBFS with 8 microbatches.")
        titan_dist.logger.info("loading HF safetensors from --model.hf_assets_path: models/x")
        titan_dist.logger.info("Loading the checkpoint from models/x.")
        titan_dist.logger.info("Finished loading the checkpoint in 0.60 seconds.")
        titan_dist.logger.info("Training starts at step 1")
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "Stages compute in bfloat16",
        "Loading the checkpoint from models/x.",
        "Training starts at step 1",
    ]
    upstream = inspect.getsource(titan_checkpoint)
    assert 'f"loading HF safetensors from' in upstream
    assert "Finished loading the checkpoint in" in upstream


@pytest.mark.parametrize("rank", [0, 1])
def test_what_each_rank_warns_of_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Guards ``is_worth_telling``."""
    monkeypatch.setenv("RANK", str(rank))
    upstream = inspect.getsource(titan_lr)
    assert 'f"Warmup steps ({warmup_steps}) exceed total steps' in upstream, "it still says so"
    titan_dist.logger.warning("Warmup steps (10) exceed total steps (2). Adjusting.")
    titan_dist.logger.warning("of this rank")
    assert caplog.messages[-1] == "of this rank"
    assert len(caplog.messages) == 2 - rank


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_importing_torchao_says_nothing() -> None:
    """Guards the levels that ``install`` sets."""
    program = "from torchtitan.upstream.fixes import install; {}; import torchao.quantization"
    said = {}
    for before in ("install()", "pass"):
        command = [sys.executable, "-c", program.format(before)]
        said[before] = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert said["pass"], "it still warns"
    assert said["install()"] == ""
