"""The user's way into an emulation: torchrun with a TOML and one flag."""

import pytest
from launcher import launch_forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from timelyfreeze.records.summary import read_summary
from timelyfreeze.records.timeline import timeline_file, timeline_from_json
from timelyfreeze.schedule.order import order_from_csv
from timelyfreeze.settings.phases import Phase


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """A shortened default run with nothing but the flag: what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("outputs")
    done = launch_forked(
        "--emulation.enable",
        "--training.seq_len=32",
        "--training.steps=14",
        "--freezing.last_warmup_step=2",
        "--freezing.last_monitor_step=8",
        "--freezing.last_ramp_step=10",
        "--freezing.monitoring=halves",
        "--freezing.max_freeze_ratio=0.8",  # "auto" may freeze nothing on a busy machine
        "--metrics.log_freq=2",
        f"--job.dump_folder={folder}",
        n_processes=1,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run_folder,) = (folder / "tb").iterdir()
    return done.stdout, run_folder


def test_the_default_run_needs_one_flag(default_run):
    output, folder = default_run
    assert "Emulating 4 ranks and 4 stages of 1F1B in this process: 64 actions a batch" in output
    before, _, after = output.partition("step:  1  ")
    assert len(before.splitlines()) <= 12, before
    shown = after.partition("Run report\n----------\n")[2].strip().splitlines()
    assert len(shown) <= 9, "with the note of the configuration"
    for step in (1, 2, 14):
        assert output.count(f"step: {step:2}  ") == 1
    report = (folder / "report.txt").read_text()
    assert "emulated                 4 ranks in one process" in report
    lines = ("without freezing", "with freezing", "gain", "upper bound", "as run on one device")
    for line in lines:
        assert any(text.startswith(line) for text in report.splitlines()), line
    assert order_from_csv((folder / "schedule.csv").read_text()).n_ranks == 4


def test_its_timelines_show_the_ranks_on_the_virtual_clock(default_run):
    _, folder = default_run
    summary = read_summary(folder)
    for phase, batch_ms in (
        (Phase.UPPER_BOUND, summary.batch_ms_unfrozen),
        (Phase.STABLE, summary.batch_ms),
    ):
        timeline = timeline_from_json(timeline_file(folder, phase).read_text())
        assert timeline.n_ranks == 4
        assert timeline.batch_ms == pytest.approx(batch_ms, rel=0.3)
        assert all(before.end_ms <= after.start_ms + 1e-6 for before, after in joined(timeline))


def joined(timeline):
    """The blocks at both ends of each edge."""
    return [(timeline.blocks[i], timeline.blocks[j]) for i, j in timeline.edges]


def test_tensorboard_has_virtual_and_real_metrics(default_run):
    _, folder = default_run
    events = EventAccumulator(str(folder))
    events.Reload()
    real = [e.value for e in events.Scalars("freezing/emulation/real_batch_ms")]
    virtual = [e.value for e in events.Scalars("freezing/emulation/virtual_batch_ms")]
    assert len(real) == len(virtual) >= 6
    assert all(0 < v < r for v, r in zip(virtual, real, strict=True))
    tags = set(events.Tags()["scalars"])
    assert {
        "freezing/emulation/virtual_tokens_per_second",
        "freezing/emulation/virtual_step_ms",
        "throughput(tps)",
        "freezing/batch_ms/measured",
        "freezing/batch_ms/predicted",
        *(f"freezing/applied_ratio/stage_{s}" for s in range(4)),
    } <= tags


def test_a_prediction_is_compared_with_the_virtual_clock(default_run):
    _, folder = default_run
    summary = read_summary(folder)
    # What ran one action after the other takes longer than any batch that is predicted.
    assert summary.batch_ms < summary.real_batch_ms
    assert summary.batch_ms_unfrozen < summary.real_batch_ms_unfrozen
    assert summary.all_frozen_batch_ms <= summary.batch_ms_predicted
    assert summary.batch_ms_predicted <= summary.batch_ms_unfrozen_predicted


def test_several_processes_are_refused_before_any_process_group(tmp_path):
    done = launch_forked("--emulation.enable", f"--job.dump_folder={tmp_path}", n_processes=2)
    assert done.returncode != 0
    assert (
        done.stdout.count(
            "several processes were started; all ranks of one pipeline take turns in one process"
        )
        == 1
    )
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.iterdir())
