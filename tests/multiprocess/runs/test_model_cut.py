"""A model of transformers, cut over processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=[pytest.mark.long]), 4])
def test_gradients_of_ranks_are_those_of_the_model_in_one_piece(rank):
    pytest.importorskip("transformers", reason="the model is one of transformers")
    script = "tests/multiprocess/helpers/cut_model_run.py"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", script, str(rank),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Two ranks may write into the same line.
    told = sorted(re.findall(r"rank \d: \d+ gradients are equal", done.stdout))
    # Embedding, norm and head, and eleven tensors of each block.
    assert told == ["rank 0: 25 gradients are equal", "rank 1: 22 gradients are equal"]
