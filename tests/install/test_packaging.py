"""What the wheel holds and what it asks for."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: [Requirement(text) for text in texts if not text.startswith("timelyfreeze")]
    for extra, texts in PROJECT["optional-dependencies"].items()
}
LIBRARY = [Requirement(text) for text in PROJECT["dependencies"]]
DEPENDENCIES = [*LIBRARY, *EXTRAS["titan"], *EXTRAS["plots"]]
DEVELOPMENT, EVALUATION = EXTRAS["dev"], EXTRAS["eval"]
OTHERS = [*EXTRAS["vision"], *EXTRAS["lora"]]
# Import names that differ from what a package is called in the index.
PACKAGES = {"PIL": "pillow", "yaml": "pyyaml"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "constraints are exact versions"
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize(
    "requirement", [*DEPENDENCIES, *DEVELOPMENT, *EVALUATION, *OTHERS], ids=lambda r: r.name
)
def test_constraints_pin_a_version_in_every_range(requirement: Requirement) -> None:
    pinned = pins().get(canonicalize_name(requirement.name))
    assert pinned is not None, f"constraints.txt does not pin {requirement.name}"
    assert requirement.specifier.contains(pinned), f"{requirement} does not allow {pinned}"


def test_constraints_pin_what_torchtitan_asks_for() -> None:
    for text in requires("torchtitan") or []:
        requirement = Requirement(text)
        if requirement.marker is None:
            pinned = pins().get(canonicalize_name(requirement.name))
            assert pinned is not None, f"constraints.txt does not pin {requirement.name}"
            assert requirement.specifier.contains(pinned)


def test_plain_training_installs_nothing_of_the_evaluation() -> None:
    needed = {canonicalize_name(r.name) for r in [*DEPENDENCIES, *DEVELOPMENT]}
    assert not needed & {canonicalize_name(requirement.name) for requirement in EVALUATION}


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_constraints_pin_all_that_the_evaluation_brings() -> None:
    """Walks what is installed, so that a version does not come from the day of the install."""
    seen: set[str] = set()
    queue = [(requirement.name, requirement.extras) for requirement in EVALUATION]
    while queue:
        name, extras = queue.pop()
        if canonicalize_name(name) in seen:
            continue
        seen.add(canonicalize_name(name))
        if name == "torch":
            # Of a CUDA build, it pins all that it brings itself.
            continue
        for text in requires(name) or []:
            wanted = Requirement(text)
            environments = [{"extra": extra} for extra in extras or {""}]
            if wanted.marker is None or any(map(wanted.marker.evaluate, environments)):
                queue.append((wanted.name, wanted.extras))
    assert len(seen) > 20
    # Comes with every environment, at the version that Python brings.
    assert seen - pins().keys() - {"setuptools"} == set()


def top_level_imports(path: Path) -> set[str]:
    """Packages that importing the module needs; imports inside functions and try do not count."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names)


def test_dependencies_hold_what_torchtitan_imports_without_asking_for_it() -> None:
    """Guards torchtitan's METADATA, which leaves out triton (and torch, on purpose).

    Fails without our declaration; fails too when upstream declares it, and ours can go.
    """
    upstream = Path(str(distribution("torchtitan").locate_file("torchtitan")))
    needed = top_level_imports(upstream / "models" / "moe" / "kernels.py")
    declared = {canonicalize_name(Requirement(text).name) for text in requires("torchtitan") or []}
    missing = needed - declared - {"torchtitan"}
    assert missing == {"torch", "triton"}
    assert missing <= {canonicalize_name(requirement.name) for requirement in DEPENDENCIES}


def test_the_library_needs_three_packages() -> None:
    assert {requirement.name for requirement in LIBRARY} == {"torch", "numpy", "highspy"}


@pytest.mark.parametrize("package", ["timelyfreeze", "torchtitan"])
def test_dependencies_hold_what_we_import(package: str) -> None:
    imported: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        imported |= top_level_imports(path)
    ours = {canonicalize_name(requirement.name) for requirement in DEPENDENCIES}
    wanted = {canonicalize_name(PACKAGES.get(name, name)) for name in imported}
    # What torchtitan asks for comes with it.
    ours |= {canonicalize_name(Requirement(text).name) for text in requires("torchtitan") or []}
    assert wanted - ours - {"timelyfreeze", "torchtitan", "tests"} == set()


@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed")
def test_the_wheel_adds_files_beside_torchtitan_and_overwrites_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    ours = set(zipfile.ZipFile(wheel).namelist())
    upstream = {str(path) for path in distribution("torchtitan").files or []}
    assert "torchtitan/__init__.py" in upstream
    assert ours & upstream == set()
    tracked = {
        path.relative_to(ROOT).as_posix()
        for package in ("timelyfreeze", "torchtitan")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".toml", ".csv", ".j2")
    }
    assert "timelyfreeze/compare/paper/items.toml" in tracked
    assert tracked - ours == set()
    outside = {name.split("/")[0] for name in ours} - {"timelyfreeze", "torchtitan"}
    assert all(re.fullmatch(r"timelyfreeze-[\w.]+\.dist-info", name) for name in outside)
