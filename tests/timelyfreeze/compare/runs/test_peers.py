"""What a user would do without freezing: how it is fitted, run, tabled and drawn."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.timelyfreeze.compare.run_folders import keys_of, table_rows, write_record, write_run
from timelyfreeze.compare.command import main
from timelyfreeze.compare.drawing import color, line_style
from timelyfreeze.compare.groups import compare, group
from timelyfreeze.compare.metrics import Criteria
from timelyfreeze.compare.plots import plots
from timelyfreeze.compare.runs.run import Run, find_runs, read_run
from timelyfreeze.compare.runs.sweep import fewer_microbatches, fewer_steps
from timelyfreeze.compare.runs.variants import freezes, peer_name, split_peer
from timelyfreeze.records.tables import STEPS

RATIO, LEARNED = "time to none's loss over none's", "learned, % of none"
SETTINGS = {
    "training": {"steps": 10, "local_batch_size": 16, "global_batch_size": -1},
    "lr_scheduler": {"warmup_steps": 5, "total_steps": None},
    "parallelism": {"pipeline_parallel_degree": 4, "pipeline_parallel_microbatch_size": 2},
    "validation": {"freq": 10},
}


def write_steps(folder: Path, step_s: Sequence[float], virtual_ms: Sequence[Any] = ()) -> Path:
    ends = [sum(step_s[: i + 1]) for i in range(len(step_s))]
    rows = [
        f"{i + 1},,{end},1,1,{virtual_ms[i] if virtual_ms else ''},,,,,,"
        for i, end in enumerate(ends)
    ]
    (folder / "steps.csv").write_text("\n".join([",".join(STEPS.header), *rows]) + "\n")
    return folder


def a_run(
    folder: Path, step_s: Sequence[float] = (2.0, *(9 * [1.0])), **changed: dict[str, Any]
) -> Run:
    """A run of none: 10 steps, of which the first takes 2 s and each other 1 s."""
    settings = {name: {**SETTINGS.get(name, {}), **more} for name, more in changed.items()}
    write_run(folder, "none", steps=10, steps_done=10, seconds=11.0, settings=SETTINGS | settings)
    return read_run(write_steps(folder, step_s))


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["apf", "timelyfreeze+apf"])
def test_a_name_tells_peer_and_method(method: str) -> None:
    name = peer_name("fewer_steps", method)
    assert split_peer(name) == ("fewer_steps", method)
    assert not freezes(name)
    assert freezes(method)
    assert split_peer(method) is split_peer("fewer_steps") is None
    assert not freezes("none")


# --- how much less --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "n_steps", "n_warmup"),
    [(8.5, 7, 4), (8.0, 7, 4), (7.99, 6, 3), (2.0, 1, 0), (11.0, 10, 5), (99.0, 10, 5)],
)
def test_as_many_steps_as_fit(tmp_path: Path, seconds: float, n_steps: int, n_warmup: int) -> None:
    # Steps end after 2, 3, ..., 11 s.
    keys = fewer_steps(a_run(tmp_path / "a"), seconds)
    assert keys["training.steps"] == n_steps
    assert keys["lr_scheduler.warmup_steps"] == n_warmup
    assert keys["validation.freq"] == n_steps
    assert "lr_scheduler.total_steps" not in keys


def test_the_whole_schedule_is_squeezed(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", lr_scheduler={"total_steps": 20}, validation={"freq": 3})
    keys = fewer_steps(run, 9.0)
    assert keys["training.steps"] == 8
    assert keys["lr_scheduler.total_steps"] == 16
    assert keys["validation.freq"] == 2  # 3 * 8 / 10 is 2.4


def test_not_even_one_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not even one step of .*a fits into 1\.9 s"):
        fewer_steps(a_run(tmp_path / "a"), 1.9)


def test_all_steps_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has the times of 2 of 10 steps in steps\.csv"):
        fewer_steps(a_run(tmp_path / "a", [1.0, 1.0]), 5.0)


@pytest.mark.parametrize(
    # 1F1B and GPipe take (microbatches + ranks - 1) (F + dX + dW): 11 thirds of 3 s, in 11 s.
    ("seconds", "n_microbatches"), [(11.0, 8), (10.99, 7), (8.0, 5), (7.99, 4), (7.0, 4)],
)  # fmt: skip
def test_as_many_microbatches_as_fit(tmp_path: Path, seconds: float, n_microbatches: int) -> None:
    keys = fewer_microbatches(a_run(tmp_path / "a"), seconds)
    assert keys == {"training.local_batch_size": 2 * n_microbatches}


def test_accumulated_batches_stay_as_many(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", training={"global_batch_size": 64})
    keys = fewer_microbatches(run, 8.0)
    assert keys == {"training.local_batch_size": 10, "training.global_batch_size": 40}


def test_no_batch_is_short_enough(tmp_path: Path) -> None:
    # With fewer microbatches than ranks torch has no 1F1B.
    with pytest.raises(ValueError, match=r"that 1F1B can have fits into 6\.99 s"):
        fewer_microbatches(a_run(tmp_path / "a"), 6.99)


def test_a_schedule_of_a_file_is_for_one_number_of_microbatches(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", parallelism={"pipeline_parallel_schedule_csv": "x.csv"})
    with pytest.raises(ValueError, match=r"schedule_csv is 'x\.csv'"):
        fewer_microbatches(run, 8.0)


# --- the runs -------------------------------------------------------------------------------------


class Trainer:
    """Stands in for torchrun: a run of ``apf`` takes 8.5 s, one of none 2 s and 1 s a step."""

    def __init__(self, fails: str | None = None) -> None:
        self.commands: list[Sequence[str]] = []
        self._fails = fails

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        self.commands.append(command)
        keys = keys_of(command)
        if keys["freezing.method"] == self._fails:
            return 3
        n = int(keys.get("training.steps", 10))
        step_s = [0.85] * n if keys["freezing.method"] == "apf" else [2.0, *([1.0] * (n - 1))]
        folder = write_run(
            Path(keys["job.dump_folder"], "tb", "x"), keys["freezing.method"],
            seed=int(keys["debug.seed"]), steps=n, steps_done=n, seconds=sum(step_s),
            schedule=keys["parallelism.pipeline_parallel_schedule"], settings=SETTINGS,
        )  # fmt: skip
        write_steps(folder, step_s)
        return 0


def run(trainer: Trainer, folder: Path, *methods: str, more: Sequence[str] = ()) -> int:
    (folder / "small.toml").write_text("[training]\nsteps = 10\n")
    arguments = ["run", str(folder / "small.toml"), str(folder / "out"), "--methods", *methods]
    return main([*arguments, "--schedules", "1F1B", "--nproc", "2", *more], starter=trainer)


def test_peers_run_behind_the_methods_that_they_are_fitted_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    methods = ["fewer_steps", "none", "apf", "fewer_microbatches"]
    assert run(trainer, tmp_path, *methods, more=["--", "--training.steps=10"]) == 0
    none, apf, steps, microbatches = map(keys_of, trainer.commands)
    assert [none["freezing.method"], apf["freezing.method"]] == ["none", "apf"]
    # What is fitted comes last, so that it holds against the trainer's arguments.
    assert trainer.commands[2][-3:] == [
        "--training.steps=7", "--lr_scheduler.warmup_steps=4", "--validation.freq=7",
    ]  # fmt: skip
    assert trainer.commands[3][-2:] == ["--training.steps=10", "--training.local_batch_size=10"]
    fitted = {"training.steps", "lr_scheduler.warmup_steps", "validation.freq", "job.dump_folder"}
    for peer in (steps, microbatches):
        changed = {key for key in peer if peer[key] != none.get(key)}
        assert changed <= fitted | {"training.local_batch_size"}
    folder = tmp_path / "out/1F1B/fewer_steps_for_apf/seed_42"
    assert steps["job.dump_folder"] == str(folder)
    record = json.loads((folder / "comparison_run.json").read_text())
    assert (record["method"], record["fitted"]["training.steps"]) == ("fewer_steps_for_apf", 7)
    rows = table_rows(capsys.readouterr().out)
    assert [(row["method"], row["seconds"]) for row in rows] == [
        ("none", "11.0"), ("apf", "8.5"), ("fewer_microbatches_for_apf", "11.0"),
        ("fewer_steps_for_apf", "8.0"),
    ]  # fmt: skip
    assert run(trainer, tmp_path, *methods, more=["--", "--training.steps=10"]) == 0
    assert len(trainer.commands) == 4


def test_a_peer_of_a_run_that_failed_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(fails="apf")
    assert run(trainer, tmp_path, "none", "apf", "fewer_steps") == 1
    assert len(trainer.commands) == 2
    assert re.search(
        r"\[3/3\] 1F1B fewer_steps_for_apf seed 42: failed: \S*/1F1B/apf/seed_42 has no finished "
        "run, whose time is needed\n",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize("others", [["none"], ["apf"], []])
def test_a_peer_needs_none_and_a_method(
    tmp_path: Path, others: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    assert run(trainer, tmp_path, "fewer_steps", *others) == 2
    assert "--methods has fewer_steps, which is given the time of" in capsys.readouterr().err
    assert trainer.commands == []


def test_runs_that_freeze_are_stretched_and_their_peers_fitted_to_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    methods = ["apf", "none", "fewer_steps"]
    assert run(trainer, tmp_path, *methods, more=["--steps-factor", "1.2"]) == 0
    none, apf, fewer = map(keys_of, trainer.commands)
    assert "training.steps" not in none
    assert trainer.commands[1][-3:] == [
        "--training.steps=12", "--lr_scheduler.warmup_steps=6", "--validation.freq=12",
    ]  # fmt: skip
    # 12 steps of 0.85 s; a run of none has done 9 in that time.
    assert (apf["freezing.method"], fewer["training.steps"]) == ("apf", "9")
    assert run(trainer, tmp_path, *methods, more=["--steps-factor", "1.1"]) == 2
    assert "was run with steps_factor 1.2, asked for is 1.1" in capsys.readouterr().err
    assert len(trainer.commands) == 3


@pytest.mark.parametrize(
    ("methods", "steps_factor", "message"),
    [
        (["none", "apf"], "0", "--steps-factor is 0.0; it must be above 0"),
        (["none", "apf"], "nan", "--steps-factor is nan; it must be above 0"),
        (
            ["apf"],
            "1.1",
            "--steps-factor multiplies the steps of none; name it in --methods as well",
        ),
    ],
)
def test_a_stretch_that_makes_no_sense(
    tmp_path: Path,
    methods: list[str],
    steps_factor: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = Trainer()
    assert run(trainer, tmp_path, *methods, more=["--steps-factor", steps_factor]) == 2
    assert message in capsys.readouterr().err
    assert trainer.commands == []


# --- what the table says --------------------------------------------------------------------------


def settings(**training: int) -> dict[str, Any]:
    return {**SETTINGS, "training": {**SETTINGS["training"], **training}}


def write_losses(folder: Path, train: Sequence[float], held_out: Mapping[int, float]) -> None:
    """Write losses of each second."""
    rows = ["step,seconds,train_loss,validation_loss"]
    for i, loss in enumerate(train, 1):
        rows.append(f"{i},{i},{loss},")
        if i in held_out:
            rows.append(f"{i},{i},,{held_out[i]}")
    (folder / "losses.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """Two seeds of none, of a method that freezes, and of its peers."""
    for seed, n_steps in ((1, 6), (2, 5)):
        none = write_run(tmp_path / f"none{seed}", "none", seed=seed, seconds=10.0,
                         settings=settings())  # fmt: skip
        write_losses(none, [8.0] * 10, {1: 8.0, 5: 6.0, 10: 4.0})
        frozen = write_run(tmp_path / f"apf{seed}", "apf", seed=seed, seconds=6.0,
                           settings=settings())  # fmt: skip
        write_losses(frozen, [8.0] * 6, {1: 8.0, 4 + seed: 4.0, 6: 4.0 if seed == 2 else 3.0})
        for peer, keys, loss in (
            ("fewer_steps", {"steps": n_steps}, 5.0),
            ("fewer_microbatches", {"local_batch_size": 2 * n_steps}, 4.5 + seed),
        ):
            folder = tmp_path / f"{peer}{seed}"
            write_record(folder, 0, method=peer_name(peer, "apf"), seed=seed)
            run = write_run(folder / "tb", "none", seed=seed, seconds=6.0,
                            settings=settings(**keys))  # fmt: skip
            write_losses(run, [8.0] * 6, {1: 8.0, 6: loss})
    return tmp_path


def test_time_to_the_loss_of_none_and_what_is_learned(
    compared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "--table", str(compared)]) == 0
    rows = table_rows(capsys.readouterr().out)
    # Repeats, although the peers of two seeds differ in what was fitted.
    assert [(row["method"], row["runs"]) for row in rows] == [
        ("none", "2"), ("apf", "2"), ("fewer_microbatches_for_apf", "2"),
        ("fewer_steps_for_apf", "2"),
    ]  # fmt: skip
    # None comes down from 8 to 4 in 10 s; apf is there after 5 and 6 s, and ends at 3 and 4.
    assert [(row[RATIO], row[LEARNED]) for row in rows] == [
        ("1.000", "100.0"), ("0.550 (0.500..0.600)", "112.5 (100.0..125.0)"),
        ("never", "50.0 (37.5..62.5)"), ("never", "75.0"),
    ]  # fmt: skip


@pytest.mark.parametrize(("end", "ratio"), [(4.0, "1.200"), (4.1, "never")])
def test_a_run_of_another_number_of_steps_counts_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: float, ratio: str
) -> None:
    """Its learning rate falls later: it passes none's last loss early, whatever is frozen."""
    for method, steps, losses in (("none", 10, {1: 8.0, 10: 4.0}), ("apf", 12, {6: 3.9, 12: end})):
        folder = write_run(
            tmp_path / method, method, steps=steps, steps_done=steps, seconds=float(steps)
        )
        write_losses(folder, [8.0] * steps, losses)
    assert main(["show", "--table", str(tmp_path)]) == 0
    assert [row[RATIO] for row in table_rows(capsys.readouterr().out)] == ["1.000", ratio]


def test_peers_stand_below_their_method(tmp_path: Path) -> None:
    for method in ("none", "apf", "lisa"):
        write_run(tmp_path / method, method)
        if method != "none":
            write_record(tmp_path / f"{method}_peer", 0, method=peer_name("fewer_steps", method))
            write_run(tmp_path / f"{method}_peer/tb", "none")
    methods = [run.method for run in compare(find_runs([tmp_path]).runs, Criteria(2))]
    assert methods == ["none", "apf", "fewer_steps_for_apf", "lisa", "fewer_steps_for_lisa"]


def test_without_two_validations_training_losses_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Running means of two: none ends at 2.5, apf has 3.5 and 2.
    for method, losses in (("none", [6.0, 4.0, 3.0, 2.0]), ("apf", [4.0, 3.0, 1.0])):
        write_losses(
            write_run(tmp_path / method, method, seconds=float(len(losses))),
            losses, {len(losses): 1.0},
        )  # fmt: skip
    assert main(["show", "--table", "--window", "2", str(tmp_path)]) == 0
    rows = table_rows(capsys.readouterr().out)
    # 3 of 4 s; from 6 to 2 instead of 2.5.
    assert [(row[RATIO], row[LEARNED]) for row in rows] == [("1.000", "100.0"), ("0.750", "114.3")]


def test_an_emulated_run_has_the_seconds_of_its_virtual_clock(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "none", emulated_ranks=4, seconds=40.0,
                       losses=[(20.0, 3.0), (40.0, 2.0)])  # fmt: skip
    run = read_run(write_steps(folder, [20.0, 20.0], [3000.0, 5000.0]))
    assert run.losses == [(3.0, 3.0), (8.0, 2.0)]
    assert [seconds for seconds, _ in run.validation_losses] == [3.0, 8.0]
    assert (run.seconds, list(run.step_ends)) == (8.0, [3.0, 8.0])


@pytest.mark.parametrize("virtual_ms", [[3000.0, ""], ()])
def test_a_virtual_clock_that_does_not_tell_all_is_told(
    tmp_path: Path, virtual_ms: Sequence[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", "none", emulated_ranks=4, seconds=40.0)
    assert read_run(write_steps(folder, [20.0, 20.0], virtual_ms)).seconds == 40.0
    assert main(["show", "--table", str(tmp_path)]) == 0
    assert "so seconds are of the process that emulates: 1F1B none" in capsys.readouterr().out


# --- what the plots show --------------------------------------------------------------------------


def test_peers_stand_in_the_plot_of_losses_and_not_among_freeze_ratios(compared: Path) -> None:
    criteria = Criteria(window=2)
    groups = group(compare(find_runs([compared]).runs, criteria))
    drawn = {plot.name: plot for plot in plots(groups, criteria)}
    figure = drawn["loss_seconds"].figure
    assert figure is not None
    legend = figure.axes[0].get_legend()
    assert legend is not None
    names = {text.get_text().replace("\n", " ") for text in legend.get_texts()}
    assert names == {"none", "apf", "fewer_steps_for_apf", "fewer_microbatches_for_apf"}
    assert all("fewer" not in missing for missing in drawn["freeze_ratio_steps"].missing)


def test_a_peer_has_the_colour_of_its_method_and_a_line_of_its_own() -> None:
    for method in ("apf", "timelyfreeze+apf"):
        peers = [peer_name(peer, method) for peer in ("fewer_steps", "fewer_microbatches")]
        assert {color(name) for name in peers} == {color(method)}
        assert len({line_style(name) for name in [*peers, method]}) == 3
