"""A run that gives ranks back as its front freezes learns what one with all of them does."""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launcher import ROOT, arguments, merged, run_scenarios
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from timelyfreeze.cli import torchrun as part
from timelyfreeze.records.summary import read_summary

# Seconds that a restart is made to look longer than it was.
LONG_AGO_S = 1000.0
BATCH = {
    "training__mixed_precision_param": "float32",
    "parallelism__pipeline_parallel_degree": 4,
    "parallelism__pipeline_parallel_microbatch_size": 2,
    "validation__no_enable": None,
    "checkpoint__enable": None,
    "checkpoint__keep_latest_k": 0,
}
# Of 8 layers 4 are frozen after step 4, and 7 after step 6.
LINEAR = {
    "freezing__method": "linear",
    "freezing__last_warmup_step": 2,
    "freezing__linear.check_interval": 2,
    "freezing__linear.layers_per_check": 4,
    "freezing__linear.max_layers": 7,
}
# 6 are after step 3, none is after step 5.
THAWING = {
    "freezing__method": "thawing",
    "freezing__last_warmup_step": 1,
    "freezing__thawing.check_interval": 2,
    "freezing__thawing.layers": 6,
}


def scenario(name, settings, **more):
    return {
        "name": name,
        "is_elastic": False,
        "module": "thawing_policy",
        "args": arguments(**{"model__flavor": "tiny", **BATCH, **settings, **more}),
    }


def run_parts(folder, name, settings, n_steps):
    """Run a scenario part after part, as the command does; return what the ranks of each saw."""
    said, n_processes, found = folder / "next_part.json", 4, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(part.NEXT, str(said))
        for number in itertools.count():
            given = scenario(
                name, settings, training__steps=n_steps, checkpoint__folder=folder / "checkpoints",
                freezing__packing__mode="efficiency",
            )  # fmt: skip
            given["resumes"] = number > 0
            place = folder / str(number)
            ranks = run_scenarios(place, n_processes, [given], script="elastic_run.py")[name]
            (run_folder,) = (place / name / "tb").iterdir()
            found.append((ranks, read_summary(run_folder)))
            if not said.exists():
                return found
            told = json.loads(said.read_text())
            said.unlink()
            told["left_at"] -= LONG_AGO_S
            patch.setenv(part.PRESENT, json.dumps(told))
            n_processes = len(told["split"])


def assert_same(parts, folder, name, settings, n_steps):
    """As in a run with all ranks: what is read and learned in each step, and what comes of it."""
    whole = scenario(name, settings, training__steps=n_steps)
    stays = run_scenarios(folder / "stays", 4, [whole], script="elastic_run.py")[name]
    rows = [pair for ranks, _ in parts for pair in ranks[0]["rows"]]
    assert rows == stays[0]["rows"]
    losses = dict(pair for ranks, _ in parts for pair in ranks[-1]["losses"])
    assert losses == pytest.approx(dict(stays[-1]["losses"]), rel=1e-5)
    for key in ("weights", "moments"):
        have, want = merged(parts[-1][0], key), merged(stays, key)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)


def test_a_run_with_fewer_and_fewer_ranks_learns_the_same(tmp_path):
    parts = run_parts(tmp_path, "linear", LINEAR, 9)
    assert [len(ranks) for ranks, _ in parts] == [4, 3, 2]
    assert [ranks[0]["step"] for ranks, _ in parts] == [4, 6, 9]
    assert_same(parts, tmp_path, "linear", LINEAR, 9)
    summaries = [summary for _, summary in parts]
    assert summaries[0].ended_early.startswith(
        "4 layers are frozen, and the run goes on in a pipeline of 3 ranks with 5,2,1 layers after "
        "step 4 of 9; its checkpoint is saved"
    )
    assert summaries[0].device_seconds == pytest.approx(4 * summaries[0].seconds)
    for before, after in itertools.pairwise(summaries):
        own = after.n_devices * after.seconds
        restart = after.device_seconds - before.device_seconds - own
        # The processes of both parts take some seconds besides.
        assert LONG_AGO_S < restart / before.n_devices < LONG_AGO_S + 300


@pytest.mark.long
def test_what_learns_again_gets_its_ranks_back(tmp_path):
    parts = run_parts(tmp_path, "thawing", THAWING, 6)
    assert [len(ranks) for ranks, _ in parts] == [4, 2, 4]
    assert_same(parts, tmp_path, "thawing", THAWING, 6)


# 8 of 10 layers are frozen after step 4: then 2 ranks will do.
COMMAND = arguments(
    **{
        **BATCH,
        **LINEAR,
        "model__flavor": "8M",
        "training__seq_len": 128,
        "training__local_batch_size": 16,
        "training__steps": 8,
        "checkpoint__interval": 1,
        "parallelism__pipeline_parallel_microbatch_size": 4,
        "freezing__linear.layers_per_check": 8,
        "freezing__linear.max_layers": 8,
    }
)


def start(folder, *keys):
    """Start the command as users do."""
    words = [
        sys.executable, "-m", "timelyfreeze", "train", "train_configs/tiny_8m.toml", "--nproc=4",
        *COMMAND, f"--job.dump_folder={folder}", *keys,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def end(process):
    try:
        said, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, said[-3000:]
    return said


def saved_weights(folder):
    dcp_to_torch_save(folder / "checkpoint/step-8", folder / "weights.pt")
    return torch.load(folder / "weights.pt", weights_only=True)


def losses(folder):
    """Return the loss of each step, of the last run folder that has it."""
    files = sorted(folder.glob("tb/*/losses.csv"))
    rows = [row for file in files for row in csv.DictReader(file.open())]
    return {int(row["step"]): float(row["train_loss"]) for row in rows}


@pytest.mark.long
def test_the_command_starts_fewer_processes_and_goes_on_when_killed(tmp_path):
    stays, packs = tmp_path / "stays", tmp_path / "packs"
    end(start(stays))
    first = start(packs, "--freezing.packing.mode=efficiency")
    try:
        limit = time.monotonic() + 400
        while not (packs / "checkpoint/step-5/.metadata").exists():
            assert first.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.1)
        ranks = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    finally:
        first.send_signal(signal.SIGKILL)
    said, _ = first.communicate(timeout=60)
    assert len(ranks) == 2
    told = "Frozen layers: 8; the run goes on in a pipeline of 2 ranks with 8,2 layers instead of 4"
    assert f"{told}, from the checkpoint of step 4" in said
    assert not (packs / "checkpoint/step-8").exists()
    assert told in end(start(packs, "--freezing.packing.mode=efficiency"))
    folders = sorted((packs / "tb").iterdir())
    settings = [json.loads((folder / "settings.json").read_text()) for folder in folders]
    degrees = [each["parallelism"]["pipeline_parallel_degree"] for each in settings]
    assert degrees == [4, 2, 4, 2]
    assert read_summary(folders[-1]).n_devices == 2
    assert losses(packs) == pytest.approx(losses(stays), rel=1e-5)
    torch.testing.assert_close(saved_weights(packs), saved_weights(stays), rtol=1e-5, atol=1e-7)
