"""Writes the tables of keys in docs/configuration.md from the fields of the configuration.

Run it after a change: python -m tests.tools.configuration_page
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from timelyfreeze.settings import CacheSettings, ElasticSettings, PackingSettings
from torchtitan.settings.job_config import (
    Columns,
    Data,
    Emulation,
    Freezing,
    Loading,
    Lora,
    Model,
    Parallelism,
    Plots,
    Report,
    Vision,
)

PAGE = Path(__file__).resolve().parents[2] / "docs/configuration.md"
SECTIONS: dict[str, type] = {
    "freezing": Freezing,
    "freezing.cache": CacheSettings,
    "freezing.elastic": ElasticSettings,
    "freezing.packing": PackingSettings,
    "lora": Lora,
    "data": Data,
    "data.columns": Columns,
    "vision": Vision,
    "emulation": Emulation,
    "plots": Plots,
    "report": Report,
    "model": Model,
    "parallelism": Parallelism,
    "training.dataloader": Loading,
}


def sentences(section: type) -> dict[str, str]:
    """Return the text under each field that this project has declared, of nearer classes first."""
    found: dict[str, str] = {}
    for kind in section.__mro__:
        if not is_dataclass(kind) or kind.__module__.startswith("torchtitan.config"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                name, said = ast.unparse(field.target), ast.literal_eval(text.value)
                found.setdefault(name, " ".join(said.split()))
    return found


def shown(field: Field[Any]) -> str:
    """Return the default of a field as TOML has it."""
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else f"`{value!r}`".replace("'", '"')


def rows(section: type) -> Iterator[str]:
    """Yield the table of a section, line by line; sections in it have tables of their own."""
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    said = sentences(section)
    # What the others are about comes first.
    for field in sorted(fields(section), key=lambda f: f.name not in ("method", "preset")):
        if field.name in said:
            text = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", said[field.name])
            if field.default is not MISSING or not is_dataclass(field.default_factory):
                yield f"| `{field.name}` | {shown(field)} | {text} |"


def with_tables(page: str) -> str:
    """Return the page with the table of each section behind its marker."""
    for name, section in SECTIONS.items():
        table = "\n".join(rows(section))
        pattern = rf"(<!-- keys of {re.escape(name)} -->\n\n)(?:\|[^\n]*\n)*"
        page, n = re.subn(pattern, lambda m, t=table: f"{m[1]}{t}\n", page)
        assert n == 1, f"<!-- keys of {name} --> comes {n} times"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
