"""Runs that were killed and went on: whether they can, and what a comparison reads of them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.timelyfreeze.compare.run_folders import write_record, write_run
from timelyfreeze.compare.runs.parts import can_go_on
from timelyfreeze.compare.runs.run import find_runs, finished_run
from timelyfreeze.records.tables import ACCURACIES, MOVES, STEPS, AccuracyRow, Move, StepRow

# A part did steps 1 to 7 of a second each and was killed; another went on from step 5, at two
# seconds a step. Step 8 was the last.
FIRST, SECOND = range(1, 8), range(5, 9)


def write_part(
    place: Path, name: str, steps: Sequence[int], seconds: float, virtual: float | None = None
) -> Path:
    """Write the tables of a part in which each step took ``seconds``."""
    folder = place / "tb" / name
    folder.mkdir(parents=True, exist_ok=True)
    ends = {step: seconds * n for n, step in enumerate(steps, 1)}
    STEPS.write(
        folder,
        [StepRow(step, "", end, 1e3 * seconds, 1.0, virtual) for step, end in ends.items()],
    )
    losses = [f"{step},{end},{10 - step}," for step, end in ends.items()]
    (folder / "losses.csv").write_text(
        "\n".join(["step,seconds,train_loss,validation_loss", *losses, ""])
    )
    validated = [
        AccuracyRow(step, end, step / 10, 1.0) for step, end in ends.items() if step in (4, 8)
    ]
    ACCURACIES.write(folder, validated)
    MOVES.write(folder, [Move(steps[1], 2, 2, 2, "8 2", 0.5)])
    return folder


def write_killed(place: Path, **more: object) -> Path:
    write_part(place, "20261128-1", FIRST, 1.0, **more)
    last = write_run(
        place / "tb/20261128-2", "apf", steps=8, steps_done=8, seconds=8.0, moves=1,
        moves_seconds=0.5, emulated_ranks=4 if more else None,
    )  # fmt: skip
    return write_part(place, last.name, SECOND, 2.0, **more)


def test_a_run_that_went_on_has_the_times_and_losses_of_all_its_parts(tmp_path: Path) -> None:
    write_killed(tmp_path / "run")
    write_record(tmp_path / "run", 0, method="apf", seed=42)
    run = finished_run(tmp_path)
    assert run is not None
    # Seconds of the first four steps, then two each; both moves count, from steps 2 and 6 on.
    ends = [1.0, 2.5, 3.5, 4.5, 6.5, 9.0, 11.0, 13.0]
    assert run.step_ends == ends
    assert run.losses == [(end, 10.0 - step) for step, end in enumerate(ends, 1)]
    assert run.top1 == [(4.5, 40.0), (13.0, 80.0)]
    assert (run.seconds, run.step_seconds) == (13.0, 12.0)
    assert run.summary.moves == 2


def test_by_the_virtual_clock_too(tmp_path: Path) -> None:
    write_killed(tmp_path / "run", virtual=100.0)
    write_record(tmp_path / "run", 0, method="apf", seed=42)
    run = finished_run(tmp_path)
    assert run is not None
    assert run.seconds == pytest.approx(8 * 0.1 + 2 * 0.5)


def test_folders_that_no_comparison_made_are_runs_of_their_own(tmp_path: Path) -> None:
    write_killed(tmp_path / "run")
    run = finished_run(tmp_path)
    assert run is not None
    assert len(run.step_ends) == len(SECOND)


def test_a_part_that_ended_early_is_no_run_beside_the_whole(tmp_path: Path) -> None:
    place = tmp_path / "run"
    write_run(place / "tb/20261128-0", "apf", steps=8, steps_done=4, seconds=4.0)
    write_part(place, "20261128-0", range(1, 5), 1.0)
    write_run(place / "tb/20261128-2", "apf", steps=8, steps_done=8, seconds=8.0)
    write_part(place, "20261128-2", SECOND, 2.0)
    write_record(place, None, method="apf", seed=42)
    (only,) = find_runs([tmp_path]).runs
    assert only.is_finished
    assert only.folder.name == "20261128-2"


@pytest.mark.parametrize(
    ("saved", "known", "can"),
    [
        (5, FIRST, True),
        (7, FIRST, True),
        (8, FIRST, False),
        (5, [*range(2, 8)], False),
        (0, FIRST, False),
    ],
)
def test_it_goes_on_where_all_before_its_checkpoint_is_known(
    tmp_path: Path, saved: int, known: Sequence[int], can: bool
) -> None:
    write_part(tmp_path, "20261128-1", known, 1.0)
    if saved:
        (tmp_path / f"checkpoint/step-{saved}").mkdir(parents=True)
        assert not can_go_on(tmp_path), "not all of it was written"
        (tmp_path / f"checkpoint/step-{saved}/.metadata").touch()
    assert can_go_on(tmp_path) is can


def test_of_broken_times_it_does_not_go_on(tmp_path: Path) -> None:
    folder = write_part(tmp_path, "20261128-1", FIRST, 1.0)
    (tmp_path / "checkpoint/step-5").mkdir(parents=True)
    (tmp_path / "checkpoint/step-5/.metadata").touch()
    (folder / STEPS.name).write_text("no,table\n1,2\n")
    assert not can_go_on(tmp_path)
