"""The chain's table and waterfall, of runs written by hand; the trainer is a stand-in."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.timelyfreeze.compare.run_folders import keys_of, table_notes, table_rows, write_run
from timelyfreeze.compare import command
from timelyfreeze.compare.chain import chain_figure, link_rows, render_chain
from timelyfreeze.compare.groups import Spread
from timelyfreeze.compare.runs.links import LINKS, Packed, read_links

# A packed sequence holds 2.5 rows, so that 20 rows alone are 8 packed sequences.
PACKED = Packed(rows=2.5, targets=400.0)
BATCH = "training.local_batch_size"


def write_link(
    output: Path, name: str, step_ms: float | None, *, seed: int = 1, packing: bool = True,
    losses: Sequence[tuple[float, float]] = (), **summary: Any,
) -> None:  # fmt: skip
    """Write the run of a link; ``losses`` are (seconds, held-out loss)."""
    folder = output / name / f"seed_{seed}"
    batch = 8 if packing else 20
    settings = {
        "training": {"local_batch_size": batch, "seq_len": 512},
        "data": {"packing": packing, "all_logits": name == "plain"},
        "freezing": {"method": name if name in ("freezing", "lora") else "none"},
        "parallelism": {
            "pipeline_parallel_schedule": "ZBVZeroBubble" if name == "split" else "1F1B",
            "partition": "time" if name == "split" else "",
        },
    }
    shutil.rmtree(folder, ignore_errors=True)
    write_run(folder, name, seed=seed, settings=settings, step_ms=step_ms, packing=packing,
              **summary)  # fmt: skip
    rows = [f"{step},{seconds},,{loss}" for step, (seconds, loss) in enumerate(losses, 1)]
    text = "\n".join(["step,seconds,train_loss,validation_loss", *rows, ""])
    (folder / "losses.csv").write_text(text)


def rows_of(output: Path, *names: str, seeds: Sequence[int] = (1,)):
    links = read_links(names or LINKS)
    return {row.link.name: row for row in link_rows(links, output, seeds, PACKED)}


def test_times_are_of_the_same_rows_and_ratios_multiply_to_the_whole(tmp_path: Path) -> None:
    """Plain: 20 rows in 10 s. Packed: 8 sequences, 20 rows, in 4 s; then 3 s; freezing 2.4 s."""
    write_link(tmp_path, "plain", 10_000.0, packing=False)
    write_link(tmp_path, "packed", 4_000.0)
    write_link(tmp_path, "learned", 3_000.0)
    write_link(tmp_path, "freezing", 2_400.0)
    write_link(tmp_path, "lora", 1_500.0)
    rows = rows_of(tmp_path, "plain", "packed", "learned", "freezing", "lora")
    assert {name: row.ratio.mean for name, row in rows.items()} == pytest.approx(
        {"plain": 1.0, "packed": 0.4, "learned": 0.75, "freezing": 0.8, "lora": 0.5}
    )
    assert {name: row.share for name, row in rows.items()} == pytest.approx(
        {"plain": 1.0, "packed": 0.4, "learned": 0.3, "freezing": 0.24, "lora": 0.15}
    )
    # 20 rows of 160 learned tokens.
    told = table_rows(render_chain(list(rows.values()), PACKED))
    assert [row["learned tokens/s"] for row in told][::3] == ["320.0", "1,333.3"]


def test_other_numbers_of_rows_are_made_even(tmp_path: Path) -> None:
    """With two batches in a packed step 40 rows take 6 s, where 20 plain ones take 10 s."""
    write_link(tmp_path, "plain", 10_000.0, packing=False)
    write_link(tmp_path, "packed", 6_000.0, batches_per_step=2)
    assert rows_of(tmp_path, "plain", "packed")["packed"].share == pytest.approx(0.3)


def test_steps_of_an_emulation_are_virtual(tmp_path: Path) -> None:
    virtual = {"emulated_ranks": 4, "virtual_step_ms": 5_000.0}
    write_link(tmp_path, "plain", 99_000.0, packing=False, **virtual)
    write_link(tmp_path, "packed", 2_000.0, emulated_ranks=4, virtual_step_ms=1_000.0)
    assert rows_of(tmp_path, "plain", "packed")["packed"].share == pytest.approx(0.2)


def test_a_ratio_is_the_median_of_turns_that_both_links_have(tmp_path: Path) -> None:
    for seed, plain, packed in ((1, 10, 5), (2, 20, 8), (3, 10, 9)):
        write_link(tmp_path, "plain", 1e3 * plain, packing=False, seed=seed)
        write_link(tmp_path, "packed", 1e3 * packed, seed=seed)
    write_link(tmp_path, "plain", 10_000.0, packing=False, seed=4)
    write_link(tmp_path, "learned", 4_000.0, seed=2)
    rows = rows_of(tmp_path, seeds=(1, 2, 3, 4))
    assert rows["packed"].ratio == Spread(0.5, 0.4, 0.9)
    assert list(rows["packed"].runs) == [1, 2, 3]
    assert rows["learned"].ratio == Spread(0.5, 0.5, 0.5)
    assert rows["learned"].share == pytest.approx(0.25)


def test_a_link_without_runs_is_left_out_with_those_set_against_it(tmp_path: Path) -> None:
    write_link(tmp_path, "plain", 10_000.0, packing=False)
    write_link(tmp_path, "learned", 4_000.0)
    assert list(rows_of(tmp_path)) == ["plain"]


def test_a_run_too_short_for_a_time_names_the_option(tmp_path: Path) -> None:
    write_link(tmp_path, "plain", None, packing=False)
    with pytest.raises(ValueError, match="no step behind its first two; raise --short"):
        rows_of(tmp_path)


def test_time_to_the_loss_is_that_of_frozen_weights_in_the_share_before(tmp_path: Path) -> None:
    """Packed is done in 40 s at 1.0; freezing gets there at 30 s, adapters never."""
    write_link(tmp_path, "plain", 10_000.0, packing=False)
    write_link(tmp_path, "packed", 4_000.0, losses=[(10, 2.0), (40, 1.0)], seconds=40.0)
    write_link(tmp_path, "freezing", 3_000.0, losses=[(10, 2.0), (30, 1.0)], seconds=30.0)
    write_link(tmp_path, "lora", 2_000.0, losses=[(10, 2.0), (20, 1.1)], seconds=20.0)
    rows = rows_of(tmp_path, "plain", "packed", "freezing", "lora")
    told = [row.to_loss for row in rows.values()]
    assert told == [1.0, pytest.approx(0.4), pytest.approx(0.4 * 30 / 40), "never"]


def test_without_held_out_losses_nothing_is_said_of_one(tmp_path: Path) -> None:
    write_link(tmp_path, "plain", 10_000.0, packing=False)
    write_link(tmp_path, "freezing", 3_000.0)
    rows = rows_of(tmp_path, "plain", "freezing")
    assert rows["freezing"].to_loss is None
    cells = table_rows(render_chain(list(rows.values()), PACKED))[1]
    assert (cells["held-out loss"], cells["time to the loss over the first"]) == ("-", "-")


def test_the_table_says_keys_losses_with_errors_and_memory(tmp_path: Path) -> None:
    write_link(tmp_path, "plain", 10_000.0, packing=False, peak_memory_gib=3.0)
    for seed, loss in ((1, 1.5), (2, 1.6)):
        write_link(tmp_path, "split", 2_000.0, seed=seed, peak_memory_gib=1.0 + seed,
                   validation_loss=loss, validation_error=0.02)  # fmt: skip
    write_link(tmp_path, "plain", 10_000.0, packing=False, seed=2)
    rows = rows_of(tmp_path, "plain", "split", seeds=(1, 2))
    _, split = table_rows(render_chain(list(rows.values()), PACKED))
    assert split["keys"] == (
        "data.packing = true, data.all_logits = false, "
        'parallelism.pipeline_parallel_schedule = "ZBVZeroBubble", parallelism.partition = "time"'
    )
    assert split["learned tokens/s"] == "1,600.0"
    assert split["time for the same rows over the link before"] == "0.200 (0.200..0.200)"
    assert (split["over the first"], split["held-out loss"]) == ("0.200", "1.5500 +- 0.0200")
    assert split["peak memory, GiB"] == "3.00"


def test_the_waterfall_has_what_is_left_and_what_was_saved(tmp_path: Path) -> None:
    for name, seconds in (("plain", 10), ("packed", 4), ("freezing", 3), ("lora", 2)):
        write_link(tmp_path, name, 1e3 * seconds, packing=name != "plain")
    rows = rows_of(tmp_path, "plain", "packed", "freezing", "lora")
    (axes,) = chain_figure(list(rows.values())).axes
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    wanted = [(0, 1), (1, 1), (0, 0.4), (0.4, 1), (0, 0.3), (0.3, 0.4), (0, 0.2), (0.2, 0.4)]
    assert bars == [pytest.approx(one) for one in wanted]
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["100%", "40%   x 0.40", "30%   x 0.75", "20%   x 0.50"]
    # Adapters stand beside the link before them, not behind it.
    colors = [bar.get_facecolor() for bar in axes.patches[::2]]
    assert colors[0] == colors[2] != colors[3]
    changes = {bar.get_facecolor() for bar in axes.patches[1::2]}
    write_link(tmp_path, "lora", 5_000.0)
    slower = rows_of(tmp_path, "plain", "packed", "freezing", "lora")
    (axes,) = chain_figure(list(slower.values())).axes
    assert {bar.get_facecolor() for bar in axes.patches[1:7:2]} == changes
    assert axes.patches[7].get_facecolor() not in changes
    assert [label.get_text() for label in axes.get_yticklabels()][1] == "rows packed"


# --- the command ----------------------------------------------------------------------------------


class Trainer:
    """Stands in for torchrun: a plain step takes 10 s, a packed one 4 s."""

    def __init__(self) -> None:
        self.keys: list[dict[str, str]] = []
        self.fails: set[str] = set()

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        self.keys.append(keys_of(command))
        folder = Path(self.keys[-1]["job.dump_folder"])
        log.write_text("says why\n")
        name = folder.parent.name
        if name in self.fails:
            return 1
        is_plain = name == "plain"
        seed = int(folder.name.removeprefix("seed_"))
        write_link(folder.parents[1], f"{name}/seed_{seed}/tb", 1e4 if is_plain else 4e3, seed=seed,
                   packing=not is_plain)  # fmt: skip
        return 0


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "read_packed", lambda settings: PACKED)
    path = tmp_path / "small.toml"
    path.write_text("[training]\nsteps = 60\nlocal_batch_size = 8\n")
    return path


def chain(trainer: Trainer, config: Path, *more: str) -> int:
    arguments = ["chain", str(config), str(config.parent / "out"), "--nproc", "1"]
    return command.main([*arguments, "--links", "plain", "packed", *more], starter=trainer)


def test_the_command_leaves_table_and_picture(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    assert chain(trainer, config, "--seeds", "1", "2", "--", "--optimizer.lr=1e-4") == 0
    assert [Path(keys["job.dump_folder"]).parent.name for keys in trainer.keys] == [
        "plain", "packed", "packed", "plain",
    ]  # fmt: skip
    assert [keys.get(BATCH) for keys in trainer.keys] == ["20", None, None, "20"]
    printed = capsys.readouterr().out
    rows = table_rows(printed)
    assert [row["over the first"] for row in rows] == ["1.000", "0.400"]
    assert table_notes(printed)[1] == (
        "a packed sequence of 512 tokens holds 2.50 rows and 400 learned tokens; "
        "20 sequences in a batch of the first link"
    )
    output = config.parent / "out"
    assert table_rows((output / "chain.md").read_text()) == rows
    assert (output / "chain.png").exists()
    assert (output / "chain.svg").exists()
    assert chain(trainer, config, "--seeds", "1", "2", "--", "--optimizer.lr=1e-4") == 0
    assert len(trainer.keys) == 4


def test_a_failed_link_is_left_out_and_the_status_says_so(config: Path) -> None:
    trainer = Trainer()
    trainer.fails = {"packed"}
    assert chain(trainer, config, "--seeds", "1") == 1
    assert len(table_rows((config.parent / "out/chain.md").read_text())) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--links", "plain", "backed"], "--links has backed"),
        (["--", "--data.packing"], "--data.packing is among the trainer's arguments"),
        (["--seeds", "1", "1"], "asked for twice: packed/seed_1, plain/seed_1"),
    ],
)
def test_errors_come_before_anything_runs(
    config: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    trainer = Trainer()
    assert chain(trainer, config, *more) == 2
    assert message in capsys.readouterr().err
    assert trainer.keys == []


def test_runs_of_other_keys_are_not_mixed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chain(Trainer(), config, "--seeds", "1", "--short", "4") == 0
    assert chain(Trainer(), config, "--seeds", "1", "--short", "5") == 2
    assert "was run with keys" in capsys.readouterr().err
