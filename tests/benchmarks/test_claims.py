"""Figures of the pages have commands, and a wrong one is found."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.claims import ROOT, main, read

CLAIMS = read()


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_is_of_a_figure_that_a_page_has(name: str) -> None:
    claim = CLAIMS[name]
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/results.md")]
    assert any(claim.words in page for page in pages)
    figures = [float(each) for each in re.findall(r"\d+(?:\.\d+)?", claim.words)]
    assert abs(claim.value) in figures
    assert re.compile(claim.find).groups == 1
    assert claim.minutes > 0 < claim.memory_gib
    for script in re.findall(r"\S+\.(?:py|sh|json)\b", claim.command):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize(
    ("program", "value", "status", "told"),
    [
        ("print(5); print(5.1)", 5.0, 1, "does not hold: no figure"),
        ("print('gain 5.1')", 5.0, 0, "holds: 5.1 (expected 5 ± 0.1)"),
        ("print('gain 5.2')", 5.0, 1, "does not hold: 5.2 (expected 5 ± 0.1)"),
        ("print('gain 9'); print('gain 5')", 5.0, 0, "holds: 5 (expected 5 ± 0.1)"),
        ("print('gain 1,005')", 1005.0, 0, "holds: 1005 (expected 1005 ± 0.1)"),
        ("print('gain 5'); raise SystemExit(3)", 5.0, 1, "does not hold: no figure"),
    ],
)
def test_a_planted_figure_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str, value: float, status: int,
    told: str,
) -> None:  # fmt: skip
    path = planted(tmp_path, program, value)
    assert main(["--file", path]) == status
    assert capsys.readouterr().out.startswith(f"planted: {told}")


def planted(folder: Path, program: str, value: float = 5.0, more: str = "minutes = 1") -> str:
    script, path = folder / "program.py", folder / "claims.toml"
    script.write_text(program)
    path.write_text(
        f"[planted]\nwords = 'none'\nfind = 'gain ([0-9.,]+)'\ncommand = '{{python}} {script}'\n"
        f"value = {value}\ntolerance = 0.1\nmemory_gib = 1\n{more}\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("minutes = 90", ""),
        ("minutes = 1\ngpu = true", ""),
        ("minutes = 1\nneeds = ['NOWHERE']", "planted: not run: set NOWHERE\n"),
    ],
)
def test_what_cannot_run_or_takes_long_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, told: str
) -> None:
    assert main(["--file", planted(tmp_path, "1 / 0", more=more), "--within", "60"]) == 0
    assert capsys.readouterr().out == told


def test_a_gpu_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    main(["--file", planted(tmp_path, "1 / 0", more="minutes = 1\ngpu = true"), "planted"])
    assert capsys.readouterr().out == "planted: not run: it needs a GPU\n"
