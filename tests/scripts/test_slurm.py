"""The Slurm script, under commands that stand in for Slurm's: what each host would start."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm.sh"
# Starts the command once for each of two hosts, as srun does.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for host in 0 1; do SLURM_NODEID=$host "$@"; done
"""
SCONTROL = "#!/usr/bin/env bash\nprintf 'first\\nsecond\\n'\n"
TRAIN = '#!/usr/bin/env bash\necho "$NGPU|$TORCHRUN_ARGS|$CONFIG_FILE|$*"\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that passes for the repository, with Slurm's commands in ``bin``."""
    (tmp_path / "bin").mkdir()
    for name, text in {"bin/srun": SRUN, "bin/scontrol": SCONTROL, "run_train.sh": TRAIN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def submit(place: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "NGPU", "PORT"))}
    environment = {**clean, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=place, env=environment, capture_output=True, text=True, timeout=20,
    )  # fmt: skip


JOB = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}


def test_every_host_starts_its_own_part_of_one_run(place: Path) -> None:
    done = submit(place, "--training.steps=7", "--a=b c", CONFIG_FILE="x.toml", **JOB)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"8|--nnodes=2 --node_rank={host} --master_addr=first --master_port=29500|x.toml|"
        "--training.steps=7 --a=b c"
        for host in (0, 1)
    ]


def test_processes_and_port_can_be_chosen(place: Path) -> None:
    done = submit(place, CONFIG_FILE="x.toml", NGPU="2", PORT="31000", **JOB)
    assert done.stdout.startswith("2|")
    assert "--master_port=31000" in done.stdout


def test_it_says_how_to_submit_it(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    done = submit(place)
    assert (done.returncode, "sbatch" in done.stderr) == (2, True)
    (place / "run_train.sh").unlink()
    done = submit(place, **JOB)
    assert (done.returncode, "from the repository" in done.stderr) == (2, True)
