"""The example that records traces, in processes of its own, and a plan from what it wrote."""

import gzip
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from timelyfreeze.cli.plan import main
from timelyfreeze.schedule import Action
from timelyfreeze.whatif.trace_file import read_trace_files

ROOT = Path(__file__).parents[2]
MICROBATCHES = 4

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(300)]


def looked_up(path: Path, action: str) -> list[float]:
    """Milliseconds of each batch, from the first to the end of the last operation."""
    events = [
        e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if "dur" in e
    ]
    took = []
    for note in (e for e in events if e["name"] == f"PP:{action}"):
        inside = [
            e
            for e in events
            if e["cat"] == "cpu_op" and e["tid"] == note["tid"]
            and note["ts"] <= e["ts"] <= note["ts"] + note["dur"]
        ]  # fmt: skip
        ends = max(e["ts"] + e["dur"] for e in inside)
        took.append((ends - min(e["ts"] for e in inside)) / 1e3)
        assert took[-1] < note["dur"] / 1e3
    assert len(took) == 3
    return took


def test_its_traces_can_be_planned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "examples/record_trace.py",
        "--layers", "1", "2", f"--microbatches={MICROBATCHES}", "--output", str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    paths = sorted(tmp_path.glob("trace_rank*.json.gz"))
    file = read_trace_files(paths)
    assert (file.n_stages, file.n_ranks, file.n_microbatches) == (2, 2, MICROBATCHES)
    for stage in (0, 1):
        for kind in "FB":
            names = [f"{stage}{kind}{microbatch}" for microbatch in range(MICROBATCHES)]
            took = [ms for name in names for ms in looked_up(paths[stage], name)]
            longest = file.table.bounds[Action.parse(names[0])][1]
            assert longest == pytest.approx(statistics.median(took), abs=1e-6)
    assert main([*map(str, paths), "--schedules", "1F1B", "GPipe", "--r-max", "0.8"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("your pipeline waits ")
    assert "in all rows: microbatches 4" in said
