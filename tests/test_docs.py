"""Documents name what exists: links, files, keys, commands and tests."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from timelyfreeze.cli.main import COMMANDS
from torchtitan.settings import job_config_class

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("profiles/*.md")])
EXPERIMENTS = sorted(ROOT.glob("docs/results/*.toml"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
QUOTED = re.compile(r"`([^`\n]+)`")
FOLDERS = "benchmarks|docs|examples|profiles|scripts|tests|timelyfreeze|torchtitan|train_configs"
SOURCES = [*FOLDERS.replace("docs|", "").split("|"), "run_train.sh"]
PLACE = re.compile(rf"(?:{FOLDERS})/[\w./-]*")
KEY = re.compile(r"(?:^|(?<=--)|(?<=[\s(]))([a-z_]+)((?:\.[a-z_]+)+)(?=$|[\s=,;)])")
FLAG = re.compile(r"(?<=\s)--([a-z_]+)((?:\.[a-z_-]+)+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z_-]+(?![\w.-])")
# Of docker, hf, lm-eval, pip and torchrun.
OTHERS_OPTIONS = {
    "--apply_chat_template",
    "--index-url",
    "--local-dir",
    "--max-restarts",
    "--logdir",
}
SUFFIXES = {"csv", "jinja", "json", "jsonl", "md", "png", "py", "safetensors", "toml", "txt"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    broken = [link for link in LINK.findall(text) if not _resolves(page, link)]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    code = [*QUOTED.findall(text), *(body for _, body in FENCE.findall(text))]
    places = {place for part in code for place in _places(part)}
    tests = {word for part in QUOTED.findall(text) for word in re.findall(r"^test_\w+$", part)}
    assert not [place for place in sorted(places) if not (ROOT / place).exists()]
    assert not sorted(tests - _test_names())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_that_are_named_are_keys(page: Path) -> None:
    text = page.read_text()
    unknown = {".".join(path) for path in _named_keys(text) if not _is_key(path)}
    assert not sorted(unknown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_named_are_commands(page: Path) -> None:
    text = page.read_text()
    lines = [line for language, body in FENCE.findall(text) if language in ("", "bash")
             for line in body.splitlines()]  # fmt: skip
    parts = [*lines, *QUOTED.findall(FENCE.sub("", text))]
    words = [re.search(r"(?:^|bin/|-m )timelyfreeze ([a-z]+)", part) for part in parts]
    assert {word[1] for word in words if word} <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_are_named_are_options(page: Path) -> None:
    text = page.read_text()
    code = [*QUOTED.findall(FENCE.sub("", text)), *(body for _, body in FENCE.findall(text))]
    named = {option for part in code for option in OPTION.findall(part)}
    assert not sorted(named - _options() - OTHERS_OPTIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_python_examples_import_exists(page: Path) -> None:
    for language, example in FENCE.findall(page.read_text()):
        body = ast.parse(example).body if language == "python" else []
        imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), page.name, "exec"), {})


def test_pages_that_sources_name_exist() -> None:
    """Messages, comments, configurations and tests send a reader to pages that are there."""
    listed = subprocess.run(
        ["grep", "-rIohE", "--exclude=*.md", r"docs/[a-z_0-9/]+\.(md|toml)", *SOURCES],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert not [page for page in sorted(set(listed.split())) if not (ROOT / page).exists()]


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_an_experiment_says_where_it_comes_from(file: Path) -> None:
    experiment = tomllib.loads(file.read_text())
    for key in ("title", "answer", "setting", "machine", "commit", "date", "command"):
        assert experiment[key].strip(), key
    for table in experiment["table"]:
        assert table["rows"]
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}, table["what"]
    if "picture" in experiment:
        assert (file.parent / experiment["picture"]).exists()


def test_every_experiment_is_in_the_results() -> None:
    links = LINK.findall((ROOT / "docs/results.md").read_text())
    assert {f"results/{file.name}" for file in EXPERIMENTS} <= set(links)


def test_a_cell_of_a_table_has_one_fact() -> None:
    texts = [FENCE.sub("", page.read_text()) for page in PAGES]
    rows = [row for text in texts for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    assert len(rows) > 500
    assert not [row for row in rows if ";" in row]


def test_pages_are_short() -> None:
    assert sum(len(page.read_text().split()) for page in PAGES) <= 36_000
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 900
    assert len(readme.splitlines()) <= 150


def _resolves(page: Path, link: str) -> bool:
    if re.match(r"[a-z]+:", link):
        return True
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in _anchors(target))


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors of ``page``'s headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def _places(part: str) -> Iterator[str]:
    """Yield the files and folders of the repository that a piece of code names."""
    for found in PLACE.finditer(part):
        place, after = found[0].rstrip("."), part[found.end() : found.end() + 1]
        before = part[found.start() - 1] if found.start() else ""
        # A part of a longer path, and names with a hole in them, are no claim.
        if before not in ("/", "-", "{", ".", *"abcdefghijklmnopqrstuvwxyz_") and after not in (
            *"<*{[",
        ):
            yield place


@cache
def _test_names() -> set[str]:
    listed = subprocess.run(
        ["grep", "-rhoE", r"def test_\w+", str(ROOT / "tests")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {line.removeprefix("def ") for line in listed.split("\n")}


@cache
def _options() -> set[str]:
    listed = subprocess.run(
        ["grep", "-rIohE", "--include=*.py", "--include=*.sh", "--", "--[a-z][a-z_-]+", *SOURCES],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return set(listed.split())


def _named_keys(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the keys of the configuration that a page names, in text, on commands and in TOML."""
    sections = {field.name for field in fields(_configuration())}
    for language, body in FENCE.findall(text):
        if language == "toml":
            yield from _leaves(tomllib.loads(body))
        else:
            for section, rest in FLAG.findall(body):
                yield (section, *rest[1:].replace("-", "_").split("."))
    for part in QUOTED.findall(FENCE.sub("", text)):
        for section, rest in KEY.findall(part):
            path = (section, *rest[1:].split("."))
            if section in sections and path[-1] not in SUFFIXES:
                yield path


def _leaves(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name)


_configuration = cache(job_config_class)


@cache
def _is_key(path: tuple[str, ...]) -> bool:
    cls: Any = _configuration()
    for name in path:
        if not is_dataclass(cls) or name not in {field.name for field in fields(cls)}:
            # A boolean is switched off by --section.no_key.
            return name.startswith("no_") and _is_key((*path[:-1], name.removeprefix("no_")))
        cls = _type_of(cls, name)
    return True


def _type_of(cls: Any, name: str) -> Any:
    try:
        return get_type_hints(cls)[name]
    except NameError:  # a type that its module imports for type checkers only
        return next(field.type for field in fields(cls) if field.name == name)
