"""The script that measures gradients in subspaces prints a row for each block."""

import pytest
from low_rank_cost import SHAPES, main


def test_every_rank_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "135M", (16, 8, 24))
    main(["--shapes", "135M", "--tokens", "4", "--ranks", "2", "3", "--repeats", "1"])
    *_, head, _, row = capsys.readouterr().out.strip().splitlines()
    assert head.split("|")[4:6] == [" rank 2 (a turn) ", " rank 3 (a turn) "]
    name, *times = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == "135M"
    assert all(float(cell.split()[0]) > 0.0 for cell in times)
