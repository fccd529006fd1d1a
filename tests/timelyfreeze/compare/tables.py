"""Tables of run folders, as a user reads them."""

import csv
import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.timelyfreeze.compare.run_folders import table_notes, table_rows
from timelyfreeze.compare.groups import compare
from timelyfreeze.compare.metrics import Criteria
from timelyfreeze.compare.runs.run import find_runs, read_run
from timelyfreeze.compare.table import render_csv, render_markdown, tabulate


def rendered(*folders: Path, window: int = 2, reference: Path | None = None) -> str:
    found = find_runs(folders)
    criteria = Criteria(window, None if reference is None else read_run(reference))
    compared = compare(found.runs, criteria)
    return render_markdown(tabulate(compared, found, criteria), criteria)


def table(*folders: Path, **criteria: Any) -> tuple[list[dict[str, str]], list[str]]:
    text = rendered(*folders, **criteria)
    return table_rows(text), table_notes(text)


def told(folder: Path, titles: Collection[str] = (), **criteria: Any) -> str:
    """Return known cells, those of ``titles`` or all, and notes; ``folder`` is FOLDER in them."""
    rows, notes = table(folder, **criteria)
    lines = [
        "; ".join(f"{title}: {text}" for title, text in row.items()
                  if text != "-" and title in (titles or row))
        for row in rows
    ]  # fmt: skip
    return "\n".join([*lines, *(f"- {note}" for note in notes), ""]).replace(str(folder), "FOLDER")


def csv_rows(folder: Path, window: int = 2) -> list[dict[str, str]]:
    compared = compare(find_runs([folder]).runs, Criteria(window))
    return list(csv.DictReader(io.StringIO(render_csv(compared))))
