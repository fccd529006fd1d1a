"""Runs are killed, stopped, starved and spoilt: ``docs/faults.md`` says what is left."""

import json
import math

import pytest
from faults import equal_weights, last_run_file, run_with

from torchtitan.freezing.report.reports import shown_report

# The phases are those of the table of methods; checkpoints are at steps 3, 6, 9 and 12.
KILLED_IN = {"lower_bound": 6, "stable": 11}
WRITTEN_AT = 12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run_with({}, folder)
    assert ended.status == 0, ended.output[-4000:]
    assert json.loads(last_run_file(folder, "summary.json"))["ended_early"] is None
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """One job that is killed in each phase and started again each time, and its folder."""
    folder = tmp_path_factory.mktemp("killed")
    runs = {}
    for phase, step in KILLED_IN.items():
        fault = {"at": "step", "step": step, "rank": 1, "signal": "SIGKILL"}
        runs[phase] = run_with(fault, folder)
    fault = {"at": "checkpoint", "step": WRITTEN_AT, "rank": 1, "signal": "SIGKILL"}
    runs["checkpoint"] = run_with(fault, folder)
    half_written = sorted(path.name for path in (folder / "checkpoint/step-12").iterdir())
    runs["last"] = run_with({}, folder)
    return runs, folder, half_written


@pytest.mark.parametrize("phase", [*KILLED_IN, "checkpoint"])
def test_a_killed_rank_takes_the_others_along_and_is_named(killed, phase):
    run = killed[0][phase]
    assert run.status != 0
    assert run.left == []
    assert run.lines("Signal 9 (SIGKILL) received by PID")
    assert "Run report" not in run.output
    if phase in KILLED_IN:
        assert run.lines(f"Freezing phase {phase} from step"), "it was killed where it should be"
        assert not run.lines("step: ", f" {KILLED_IN[phase]} ", "loss:")


def test_a_restart_goes_on_from_the_last_finished_checkpoint(killed):
    runs, _, _ = killed
    begun = [run.lines("Training starts at step")[0].split()[-1] for run in runs.values()]
    # Those killed in steps 6 and 11 had written steps 3 and 9; then 9.
    assert begun == ["1", "4", "10", "10"]


def test_a_half_written_checkpoint_is_passed_over(killed):
    runs, folder, half_written = killed
    assert ".metadata" not in half_written
    assert any(name.endswith(".distcp") for name in half_written)
    (line,) = runs["last"].lines("passed over")
    assert "step-12" in line
    assert (folder / "checkpoint/step-12/.metadata").is_file(), "written again"


def test_after_all_that_the_weights_are_those_of_an_undisturbed_run(killed, undisturbed):
    runs, folder, _ = killed
    assert runs["last"].status == 0
    assert equal_weights(folder, undisturbed)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A job whose terminal goes, then one that gets Ctrl-C, each started again."""
    folder = tmp_path_factory.mktemp("stopped")
    at = {"at": "step", "rank": 0, "to": "agent"}
    runs, reports = {}, {}
    for name, step in {"SIGHUP": 4, "SIGINT": 8}.items():
        runs[name] = run_with({**at, "step": step, "signal": name}, folder, checkpoint__interval=99)
        reports[name] = (last_run_file(folder, "summary.json"), last_run_file(folder, "report.txt"))
    saved = sorted(path.name for path in (folder / "checkpoint").iterdir())
    runs["last"] = run_with({}, folder, checkpoint__interval=99)
    return runs, reports, saved, folder


@pytest.mark.parametrize(("name", "step"), [("SIGHUP", 5), ("SIGINT", 9)])
def test_a_signal_to_stop_saves_a_checkpoint_and_says_so(stopped, name, step):
    runs, reports, saved, _ = stopped
    assert runs[name].status != 0
    assert runs[name].left == []
    assert f"step-{step}" in saved
    summary, report = reports[name]
    told = json.loads(summary)
    assert told["steps_done"] == step
    assert told["ended_early"].startswith(f"stopped by {name} after step {step} of 13; its checkp")
    assert told["ended_early"] in report
    assert shown_report(report).strip() in runs[name].output


def test_a_stopped_run_comes_to_the_same_weights(stopped, undisturbed):
    runs, _, saved, folder = stopped
    assert saved == ["step-5", "step-9"]
    assert runs["last"].lines("Training starts at step 10")
    assert equal_weights(folder, undisturbed)


def test_a_signal_while_a_plan_is_solved_takes_no_plan_and_no_worker(tmp_path, undisturbed):
    """torchrun sends it to all processes of a rank: the solver and who reads data are two."""
    settings = {"training__dataloader.num_workers": 1, "checkpoint__interval": 99}
    run = run_with({"solver": "stopped"}, tmp_path, **settings)
    assert "stopped by SIGTERM after step 7 of 13; its checkpoint is saved" in run.output
    assert (tmp_path / "checkpoint/step-7/.metadata").is_file()
    assert run.left == []
    assert run_with({}, tmp_path, **settings).status == 0
    assert equal_weights(tmp_path, undisturbed)


def test_what_is_killed_while_it_reports_is_done_and_leaves_no_half(tmp_path):
    run = run_with({"at": "report", "rank": 1, "signal": "SIGKILL"}, tmp_path)
    assert (run.status, run.left) == (1, [])
    (folder,) = (tmp_path / "tb").iterdir()
    assert not [path for path in folder.iterdir() if path.name in ("summary.json", "report.txt")]
    again = run_with({}, tmp_path)
    assert again.status == 0
    assert again.lines("This run is done at step 13", "it ended before its report was written")


def test_a_signal_while_a_run_reports_does_not_keep_it_from_it(tmp_path):
    fault = {"at": "report", "rank": 1, "signal": "SIGHUP", "to": "agent"}
    assert run_with(fault, tmp_path).left == []
    assert json.loads(last_run_file(tmp_path, "summary.json"))["ended_early"] is None
    assert "with freezing" in last_run_file(tmp_path, "report.txt")


def test_ranks_do_not_outlive_torchrun_nor_the_solver_them(tmp_path):
    """torchrun is killed while a plan is being solved; nothing is to be saved."""
    fault = {"step": 7, "rank": 0, "signal": "SIGKILL", "to": "agent", "solver": "hangs"}
    run = run_with(
        fault,
        tmp_path,
        checkpoint__enable=False,
        checkpoint__interval=False,
        checkpoint__keep_latest_k=False,
        checkpoint__no_last_save_model_only=False,
        freezing__solver_delay_steps=5,
        freezing__last_ramp_step=12,
    )
    assert run.status == -9
    assert run.left == []
    told = json.loads(last_run_file(tmp_path, "summary.json"))["ended_early"]
    assert told.startswith("stopped by SIGTERM after step 8 of 13; nothing is saved, since checkp")


def test_a_solver_that_hangs_costs_its_time_limit_and_the_plan(tmp_path):
    run = run_with(
        {"solver": "hangs"},
        tmp_path,
        freezing__solver_delay_steps=1,
        freezing__solver_time_limit_s=2,
    )
    assert run.status == 0
    assert run.left == []
    (line,) = run.lines("Nothing is frozen")
    assert "WARNING" in line
    assert "gave no answer within 2 s" in line
    assert run.lines("step: 13 ")


def test_without_a_solver_and_then_without_rows(tmp_path):
    """Training goes on unfrozen, and ends with a checkpoint where rows end."""
    run = run_with({"solver": "absent", "rows_end": 11}, tmp_path)
    assert run.status == 0
    (line,) = run.lines("Nothing is frozen")
    assert "the solver highspy cannot be imported" in line
    told = json.loads(last_run_file(tmp_path, "summary.json"))
    assert "highspy" in told["failure"]
    assert told["average_freeze_ratio"] < 0.5, "but for the lower bound"
    assert told["ended_early"] == "no more examples after step 10 of 13; its checkpoint is saved"
    assert told["steps_done"] == 10
    assert (tmp_path / "checkpoint/step-10/.metadata").is_file()


def test_a_full_disk_ends_the_run_at_its_next_checkpoint(tmp_path):
    """The last one is whole; what else cannot be written is told once and ends nothing."""
    fault = {"step": 4, "rank": 1, "full": True, "max_bytes": 30000}
    run = run_with(fault, tmp_path)
    assert run.status != 0
    assert run.left == []
    assert len(run.lines("The run's files in", "cannot be written (No space left on device)")) == 1
    assert run.lines("step:  5 ")
    lines = run.lines("CheckpointError", "step-6 cannot be written", "File too large")
    assert lines
    kept = f"make room there; the same command resumes from {tmp_path}/checkpoint/step-3"
    assert [line for line in lines if kept not in line] == []


def test_a_loss_that_is_not_finite_is_told_once_with_what_was_frozen(tmp_path):
    """Upstream logs it and trains on, and so do we."""
    run = run_with({"step": 11, "rank": 1, "poison": True}, tmp_path)
    assert run.status == 0
    (line,) = run.lines("WARNING", "has loss nan")
    assert "Step 12 has" in line or "Step 11 has" in line
    assert "in freezing phase stable, frozen of each stage: 0:" in line
    assert math.isnan(json.loads(last_run_file(tmp_path, "summary.json"))["last_loss"])


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    first = run_with({"at": "step", "step": 4, "rank": 1, "signal": "SIGKILL"}, tmp_path)
    assert first.left == []
    run = run_with({}, tmp_path, model__flavor="debugmodel")
    assert run.status != 0
    assert run.lines("model.flavor is 'debugmodel' and was 'short': the checkpoint", "step-3")
    assert not run.lines("Training starts"), "told before that"


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_others_in_time(tmp_path):
    """It takes half a minute more until torchrun kills what does not answer.

    gloo keeps the time limit under which its connections were made, that of initialization.
    """
    fault = {"step": 5, "rank": 1, "signal": "SIGSTOP"}
    limits = {
        "comm__init_timeout_seconds": 30,
        "comm__train_timeout_seconds": 5,
        "freezing__solver_time_limit_s": 4,
    }
    run = run_with(fault, tmp_path, **limits)
    assert run.status != 0
    assert run.left == []
    (line,) = run.lines("Rank 0 ends in step 5 (lower_bound)")
    assert "imed out" in line
    assert f"the same command resumes from {tmp_path}/checkpoint/step-3" in line
