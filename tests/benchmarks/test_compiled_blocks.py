"""The script that measures compiled blocks prints a row for each way and ratio."""

import pytest
from compiled_blocks import main


@pytest.mark.slow
def test_every_way_and_ratio_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--dim=32", "--layers=2", "--rows=1", "--length=4", "--repeats=2"]
    main(["--backend=aot_eager", *sizes, "--ratios", "0", "0.5"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines[:2]] == [
        "first microbatch with ratio 0",
        "first microbatch with ratio 1",
    ]
    assert [line[:23].strip() for line in lines[3:]] == [
        f"{ratio}  {way}"
        for ratio in ("0.00", "0.50")
        for way in ("eager, tensors", "eager, blocks", "compiled, blocks")
    ]
