"""The user's way in: torchrun with a TOML, through all phases, on four processes."""

import json

import pytest
from launcher import FREEZING, launch_forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from timelyfreeze.cli.plan import main as plan_from_bounds
from timelyfreeze.planning.plan import plan_from_json
from timelyfreeze.records.tables import COUNTS, STEPS, read_responses
from timelyfreeze.records.timeline import timeline_file, timeline_from_json
from timelyfreeze.schedule.order import order_from_csv
from timelyfreeze.settings.phases import Phase
from timelyfreeze.whatif.bounds_file import read_bounds_file
from torchtitan.freezing.report.reports import shown_report


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """A shortened default run: what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("outputs")
    # "auto" would freeze nothing where the machine is too busy to gain by it.
    given = {
        "freezing__max_freeze_ratio": 0.8,
        "freezing__monitoring": "halves",
        # No control step within the 14.
        "freezing__control_every": 20,
        "metrics__log_freq": 2,
    }
    settings = {**FREEZING, **given, "metrics__enable_tensorboard": None}
    skipped = {"freezing.method", "model.flavor"}
    args = [
        f"--{key.replace('__', '.')}" + ("" if value is None else f"={value}")
        for key, value in settings.items()
        if key.replace("__", ".") not in skipped
    ]
    done = launch_forked(
        *args, "--training.seq_len=32", f"--job.dump_folder={folder}", n_processes=4
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run_folder,) = (folder / "tb").iterdir()
    return done.stdout, run_folder


def test_report_names_gain_prediction_limit_and_files(default_run):
    output, folder = default_run
    report = (folder / "report.txt").read_text()
    for line in [
        "without freezing", "with freezing", "gain", "batch without freezing",
        "batch with freezing", "upper bound", "planned freeze ratio",
        "average freeze ratio", str(folder),
    ]:  # fmt: skip
        assert line in report, line
    assert shown_report(report).strip() in output
    before = output.partition("step:  1  ")[0]
    assert len(before.splitlines()) <= 12, before


def test_loss_is_printed_once_and_no_other_rank_talks(default_run):
    output, _ = default_run
    for step in (1, 2, 4, 14):
        assert output.count(f"step: {step:2}  ") == 1
    assert "loss: -1.0" not in output


def test_plain_output_when_there_is_no_terminal(default_run):
    output, _ = default_run
    assert "\x1b[" not in output
    assert "\r" not in output


def test_plan_bounds_and_order_lie_beside_the_run(default_run):
    _, folder = default_run
    plan = plan_from_json((folder / "plan.json").read_text())
    order = order_from_csv((folder / "schedule.csv").read_text())
    bounds = json.loads((folder / "bounds.json").read_text())["bounds"]
    assert [a for rank in order.ranks for a in rank] == list(plan.actions)
    assert list(bounds) == [str(a) for a in plan.actions]
    assert max(plan.stage_mean_ratios().values()) <= 0.8 + 1e-9
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["freezing"]["last_monitor_step"] == 8
    file = read_bounds_file(folder / "bounds.json")
    assert (file.metadata.schedule, file.metadata.ranks, file.metadata.layers) == (
        "1F1B",
        4,
        (3, 3, 2, 2),
    )
    assert file.metadata.tokens_per_microbatch == 2 * settings["training"]["seq_len"]
    assert plan_from_bounds([str(file.path), "--splits", "default", "balanced"]) == 0


def test_tensorboard_has_the_metrics(default_run):
    _, folder = default_run
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "loss_metrics/global_avg_loss", "throughput(tps)", "grad_norm", "freezing/phase",
        "freezing/average_ratio", "freezing/batch_ms/measured", "freezing/batch_ms/predicted",
        *(f"freezing/planned_ratio/stage_{s}" for s in range(4)),
        *(f"freezing/applied_ratio/stage_{s}" for s in range(4)),
    } <= tags  # fmt: skip
    assert [e.value for e in events.Scalars("freezing/phase")] == [0, 0, 1, 2, 2, 3, 4, 4]
    assert "settings/text_summary" in events.Tags()["tensors"]
    assert all(0 < e.value < 9 for e in events.Scalars("loss_metrics/global_avg_loss"))


def test_the_run_has_drawn_its_timelines(default_run):
    """The plot shows a batch of the phase that the report speaks of."""
    _, folder = default_run
    order = order_from_csv((folder / "schedule.csv").read_text())
    steps = {row.step: row for row in STEPS.read(folder)}
    for phase in (Phase.UPPER_BOUND, Phase.STABLE):
        timeline = timeline_from_json(timeline_file(folder, phase).read_text())
        assert timeline.order == order
        row = steps[timeline.step]
        assert row.phase == phase.value
        # A batch lies within its step, on one machine's clock.
        assert 0.0 < timeline.batch_ms < row.step_ms
        frozen = [b for b in timeline.blocks if b.freeze_ratio > 0.0]
        assert bool(frozen) == (phase is Phase.STABLE)
    plots = folder / "plots"
    for name in ("timeline_measured", "timeline_predicted"):
        assert 0 < (plots / f"{name}.png").stat().st_size < 200_000
    assert json.loads((plots / "trace_measured.json").read_text())["traceEvents"]
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {"freezing/timeline/measured", "freezing/timeline/predicted"} <= set(
        events.Tags()["images"]
    )


def test_errors_are_reported_once_before_any_process_group(tmp_path):
    done = launch_forked(
        "--freezing.max_freeze_ratio=1.5",
        "--freezing.last_monitor_step=5",
        "--training.local_batch_size=3",
        f"--job.dump_folder={tmp_path}",
        n_processes=4,
    )
    assert done.returncode != 0
    assert done.stdout.count("error: The configuration has 3 errors") == 1
    for key in (
        "freezing.max_freeze_ratio is 1.5",
        "last_monitor_step is 5",
        "local_batch_size is 3",
    ):
        assert key in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "said"),
    [("--unknown.key=1", "unknown is no key of the configuration"), ("--help", "usage: ")],
)
def test_what_the_parser_prints_is_printed_once(argument, said):
    done = launch_forked(argument, n_processes=4)
    printed = done.stdout + done.stderr
    assert printed.count(said) == 1
    # Help is no failure: torchrun has nothing to say of it.
    assert (done.returncode == 0) == (argument == "--help")
    assert ("ChildFailedError" in printed) == (argument != "--help")


def test_a_quiet_run_prints_where_its_report_is_and_nothing_else(tmp_path):
    done = launch_forked(
        "--quiet", "--training.steps=3", "--training.seq_len=32", "--freezing.method=none",
        "--parallelism.pipeline_parallel_degree=2", "--metrics.log_freq=1",
        "--metrics.no_enable_tensorboard", "--plots.no_enable",
        f"--job.dump_folder={tmp_path}",
        n_processes=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder,) = (tmp_path / "tb").iterdir()
    lines = [line for line in done.stdout.splitlines() if line and " - WARNING - " not in line]
    assert lines == [f"report: {folder / 'report.md'}"]
    assert "INFO" not in done.stderr
    assert len((folder / "steps.csv").read_text().splitlines()) == 4
    assert "no freezing" in (folder / "report.md").read_text()


def test_a_run_leaves_its_steps_counts_responses_and_page(default_run):
    _, folder = default_run
    steps = STEPS.read(folder)
    assert [row.step for row in steps] == list(range(1, 15))
    assert [row.freeze_ratio for row in steps[:5]] == [0.0] * 5
    assert [row.freeze_ratio for row in steps[5:8]] == [1.0] * 3
    assert all(0.0 < row.freeze_ratio < 1.0 for row in steps[10:])
    assert [row.p_eff for row in steps[:8] if row.p_eff is not None] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert all(0.15 < row.p_eff < 1.0 for row in steps[9:] if row.p_eff is not None)
    counts = COUNTS.read(folder)
    assert {count.rank for count in counts} == {0, 1, 2, 3}
    assert {count.backwards for count in counts} == {6 * 8}
    assert sum(count.elements for count in counts) == 8_918_272
    kept = read_responses(folder)
    assert {row.stage for row in kept} == {0, 1, 2, 3}
    assert {0.0, 1.0} <= {row.fraction for row in kept}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["kappa_over_p_eff"] == pytest.approx(summary["kappa"] / summary["p_eff"])
    page = (folder / "report.md").read_text()
    for part in ("## Outcome", "## Freezing", "## Hardware", "## Settings", "steps.csv"):
        assert part in page


def test_upstream_toml_runs_unchanged(tmp_path):
    """Upstream's keys only, upstream's default data set and tokenizer folder."""
    config = tmp_path / "upstream.toml"
    config.write_text(
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n'
        'hf_assets_path = "./tests/assets/tokenizer"\n'
        '[training]\ndataset = "c4_test"\nlocal_batch_size = 4\nseq_len = 64\nsteps = 2\n'
        "[parallelism]\npipeline_parallel_degree = 2\n"
        '[activation_checkpoint]\nmode = "selective"\n'
    )
    done = launch_forked(f"--job.dump_folder={tmp_path}", n_processes=2, config=config)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("step:  1  loss:") == 1
    assert "Freezing phase" not in done.stdout
