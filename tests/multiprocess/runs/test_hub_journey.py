"""From an id of the hub to a folder that transformers loads, as users go; the hub is its cache."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from launcher import ROOT

from tests.torchtitan.helpers.hf_models import FAMILIES, logits_of, some_tokens, write_folder

ID, COMMIT = "some-owner/Tiny-Qwen3", "0123456789abcdef0123456789abcdef01234567"


def command(place, *words):
    variables = {
        **os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(place / "hub"),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "timelyfreeze", *map(str, words)],
        cwd=ROOT, env=variables, capture_output=True, text=True, timeout=400,
    )  # fmt: skip


def train(place, name):
    keys = {
        "model.flavor": "hf", "model.hf_assets_path": name, "job.dump_folder": place / "outputs",
        "training.steps": 8, "training.seq_len": 64, "freezing.last_warmup_step": 1,
        "freezing.last_monitor_step": 5, "freezing.last_ramp_step": 6, "optimizer.lr": 1e-2,
        "freezing.max_freeze_ratio": 0.8, "freezing.monitoring": "halves",
        "freezing.discard_batches": 0, "data.chat_template": "alpaca",
        "parallelism.pipeline_parallel_degree": 2,
    }  # fmt: skip
    return command(
        place, "train", "train_configs/tiny_8m.toml", "--nproc=1", "--emulation.enable",
        "--checkpoint.enable", "--checkpoint.initial_load_in_hf",
        *(f"--{key}={value}" for key, value in keys.items()),
    )  # fmt: skip


def test_an_id_is_trained_frozen_exported_and_loaded(tmp_path):
    model = tmp_path / "hub" / "models--some-owner--Tiny-Qwen3"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    snapshot = write_folder(model / "snapshots" / COMMIT, FAMILIES["qwen3"], n_files=2)
    shutil.copytree(ROOT / "tests/assets/tokenizer", snapshot, dirs_exist_ok=True)
    done = train(tmp_path, ID)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"model.hf_assets_path: {ID} of the hub lies in {snapshot}" in done.stdout
    (run,) = (tmp_path / "outputs" / "tb").iterdir()
    done = command(tmp_path, "export", run)
    assert done.returncode == 0, done.stderr
    folder = run / "hf_step-8"
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = some_tokens(2, 32)
    with torch.no_grad():
        found = loaded.eval()(tokens).logits
    torch.testing.assert_close(found, logits_of(folder, tokens), atol=1e-4, rtol=0)
    assert (found - logits_of(snapshot, tokens)).abs().max() > 0.1, "nothing was trained"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False)
    assert text.endswith("### Instruction:\nWhy?\n\n### Response:\n")
    assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == 1


def test_an_id_that_is_not_there_ends_before_processes_start(tmp_path):
    done = train(tmp_path, "some-owner/nothing")
    assert done.returncode == 2
    assert done.stdout.startswith("error: model.hf_assets_path is 'some-owner/nothing', which is")
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "outputs").exists()
