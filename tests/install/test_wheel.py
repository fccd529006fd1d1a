"""A wheel in a fresh environment: the library alone, then training, planning and drawing.

Packages come from the environment of the tests, by what the metadata of each asks for: what is
asked for and not there, or there and not asked for, is told as with pip, without its minutes.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "tests/assets"
# Continuous integration runs it besides the suite.
pytestmark = pytest.mark.long

STEPS = [
    "--training.steps=8", "--freezing.last_warmup_step=1", "--freezing.last_monitor_step=5",
    "--freezing.last_ramp_step=6", "--freezing.discard_batches=0", "--lr_scheduler.warmup_steps=2",
    "--emulation.enable", "--training.seq_len=64", "--plots.no_enable",
    f"--model.hf_assets_path={ASSETS / 'tokenizer'}",
]  # fmt: skip


def run(*command: object, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=900,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that has the library and what it needs."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    install(folder / "bin/python", wheel)
    return folder / "bin/python"


def install(python: Path, wheel: Path, *extras: str) -> None:
    """Install the wheel, and what it asks for: the files of this environment, which pip chose."""
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=python.parent)
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (metadata,) = packages.glob("timelyfreeze-*.dist-info")
    for name in needed(PathDistribution(metadata), extras):
        for file in distribution(name).files or ():
            link = packages / file
            # Neither commands nor what a link already is.
            if file.parts[0] != ".." and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.locate())


def needed(wheel: Distribution, extras: Sequence[str]) -> list[str]:
    """Return the names of all packages that a distribution asks for, directly or not."""
    found: dict[str, None] = {}
    asking: list[tuple[Distribution, Sequence[str]]] = [(wheel, extras)]
    while asking:
        asks, with_extras = asking.pop()
        for requirement in map(Requirement, asks.requires or ()):
            environments = [{"extra": extra} for extra in ("", *with_extras)]
            if not any(requirement.marker is None or requirement.marker.evaluate(environment)
                       for environment in environments):  # fmt: skip
                continue
            if requirement.name == wheel.name:
                asking.append((wheel, list(requirement.extras)))
            elif requirement.name not in found:
                found[requirement.name] = None
                asking.append((distribution(requirement.name), list(requirement.extras)))
    return list(found)


def test_a_wheel_trains_plans_and_draws(python: Path, wheel: Path, tmp_path: Path) -> None:
    command = python.parent / "timelyfreeze"
    # The library alone: no TorchTitan, no matplotlib.
    shutil.copytree(ROOT / "profiles/tiny_8m_1F1B", tmp_path / "profile")
    said = run(command, "plan", "profile/bounds.json", "--schedules", "1F1B", cwd=tmp_path)
    assert "1F1B" in said
    done = subprocess.run(
        [command, "draw", "."], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert 'pip install "timelyfreeze[plots]"' in done.stderr
    # With what training needs, from a folder that is not the repository.
    install(python, wheel, "titan")
    config = tmp_path / "x.toml"
    text = (ROOT / "train_configs/tiny_8m.toml").read_text()
    config.write_text(text.replace("./tests/assets", str(ASSETS)))
    said = run(command, "train", config, "--nproc", "1", *STEPS, cwd=tmp_path)
    assert "Run report" in said
    (summary,) = tmp_path.glob("outputs/**/summary.json")
    assert json.loads(summary.read_text())
    run(command, "draw", summary.parent, cwd=tmp_path)
    assert list(summary.parent.glob("plots/*.png"))
    assert list(python.parents[1].glob("lib/python*/site-packages/torchtitan/freezing"))
