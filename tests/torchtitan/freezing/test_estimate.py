"""The command that says whether a run fits: its tables and its exit status."""

from pathlib import Path

import pytest

from torchtitan.freezing.estimate import main

CONFIG = str(Path(__file__).parents[3] / "train_configs" / "tiny_8m.toml")


def test_a_table_for_each_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([CONFIG, "--schedules", "GPipe", "1F1B"]) == 0
    text = capsys.readouterr().out
    assert "8M, GPipe over 4 ranks, 8 microbatches of 2 x 128 tokens" in text
    assert "8M, 1F1B over 4 ranks" in text
    parts = ["parameters", "gradients", "optimizer", "casts"]
    parts += ["activations", "messages", "scratch", "scores"]
    header = " | ".join(["| GiB", *parts, "total"])
    assert text.count(header) == 2
    assert text.count("| rank 3 |") == 2


def test_rows_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    main([CONFIG, "--", "--model.flavor=Llama-3-8B"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| rank")]
    for row in rows:
        *parts, total = map(float, row.strip("| ").split(" | ")[1:])
        assert sum(parts) == pytest.approx(total, abs=0.04)


def test_the_exit_status_tells_whether_all_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([CONFIG, "--device-gib", "48", "140"]) == 0
    assert capsys.readouterr().out.count("GiB a device: fits") == 2
    assert main([CONFIG, "--device-gib", "48", "140", "--", "--model.flavor=Llama-2-13B"]) == 1
    text = capsys.readouterr().out
    assert "48 GiB a device: too small for rank 0" in text
    assert "140 GiB a device: fits" in text


def test_compiled_blocks_are_told_to_keep_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([CONFIG]) == 0
    assert "compiled" not in capsys.readouterr().out
    assert main([CONFIG, "--", "--compile.enable"]) == 0
    assert "compiled ones keep less" in capsys.readouterr().out


def test_what_is_not_covered_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([CONFIG, "--", "--parallelism.tensor_parallel_degree=2"]) == 2
    assert (
        "parallelism.tensor_parallel_degree is 2; the estimate is for pipeline"
        in capsys.readouterr().err
    )


def test_an_emulation_is_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([CONFIG, "--device-gib", "1", "48", "--emulation.enable"]) == 1  # no -- needed
    text = capsys.readouterr().out
    assert "1F1B over 4 ranks, emulated in one process" in text
    assert text.count("| all ranks |") == 1
    assert "| rank" not in text
    assert "1 GiB a device: too small for all ranks" in text
    assert "48 GiB a device: fits" in text
