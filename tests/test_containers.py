"""Dockerfile, devcontainer and workflow start what the project has."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README_COMMANDS = ["./run_train.sh --emulation.enable", "scripts/test.sh"]


def test_the_image_has_what_both_commands_need() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for command in README_COMMANDS:
        assert command in (ROOT / "README.md").read_text()
        assert command in text
    assert json.loads(re.findall(r"^CMD (.*)$", text, re.M)[-1]) == README_COMMANDS[0].split()
    copied = re.findall(r"^COPY (.*) \S+$", text, re.M)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
    # The wheel that setup.sh installs in place reads these.
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE"} <= set(copied[0].split())


def test_the_devcontainer_is_built_from_the_image() -> None:
    folder = ROOT / ".devcontainer"
    given = json.loads((folder / "devcontainer.json").read_text())
    assert (folder / given["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (ROOT / given["postCreateCommand"].split()[0]).exists()


def test_the_workflow_runs_what_ci_runs() -> None:
    steps = re.findall(r"^ +- run: (.*)$", (ROOT / ".github/workflows/ci.yml").read_text(), re.M)
    assert steps == [".ci/run"]
    assert (ROOT / ".ci/run").exists()
