"""Event files, read back as TensorBoard reads them."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from tests.torchtitan.helpers.job_configs import put
from tests.torchtitan.helpers.report_runs import log_step, run_in
from tests.torchtitan.helpers.summaries import make_summary
from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.front.caching import CacheUse
from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.report.tensorboard import THROUGHPUT, RunTensorBoard, hyperparameters
from torchtitan.freezing.report.tensorboard import layout as custom_scalars
from torchtitan.freezing.report.times import PHASE_NUMBERS, BatchTimes
from torchtitan.settings.job_config import JobConfig


def config() -> JobConfig:
    config = JobConfig()
    config.model.flavor = "8M"
    put(config, "freezing", method="timelyfreeze")
    put(config, "freezing", max_freeze_ratio=[0.5, 0.8])
    config.parallelism.pipeline_parallel_degree = 2
    return config


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    folder = tmp_path_factory.mktemp("run")
    board = RunTensorBoard(str(folder), run_in(folder, config=config()))
    board.log({"throughput(tps)": 100.0, "mfu(%)": float("nan")}, 1)
    board.finish(make_summary(steps_done=90, tokens_per_second=250.0, kappa_over_p_eff=0.75))
    board.close()
    assert not [path for path in folder.iterdir() if path.is_dir()], "one run, no more below it"
    return events_of(folder)


def test_charts_stand_in_groups_and_match_their_tags(events: EventAccumulator) -> None:
    proto = events.Tensors("custom_scalars__config__")[0].tensor_proto
    layout = layout_pb2.Layout.FromString(proto.string_val[0])
    charts = {
        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
        for category in layout.category
    }
    assert list(charts) == ["speed", "freezing", "convergence", "loss"]
    assert charts == {
        group: {title: patterns for title, (_, patterns) in of.items()}
        for group, of in custom_scalars("tokens").items()
    }
    wanted = {
        "freezing/tokens_per_second", "freezing/batch_ms/measured", "freezing/batch_ms/predicted",
        "freezing/emulation/virtual_tokens_per_second", "freezing/emulation/virtual_step_ms",
        "freezing/drift", "freezing/applied_ratio/stage_3",
        "freezing/planned_ratio/stage_0", "freezing/average_ratio", "freezing/phase",
        "freezing/kappa", "freezing/p_eff", "freezing/kappa_over_p_eff",
        "loss_metrics/global_avg_loss", "validation_metrics/loss", "grad_norm",
    }  # fmt: skip
    patterns = [pattern for of in charts.values() for tags in of.values() for pattern in tags]
    assert all(any(re.match(pattern, tag) for pattern in patterns) for tag in wanted)
    assert all(any(re.match(pattern, tag) for tag in wanted) for pattern in patterns)
    assert not any(re.search(r"[()]", tag) for tag in wanted), "the tab would draw no line of it"


def test_what_the_tab_cannot_draw_has_a_tag_that_it_can(events: EventAccumulator) -> None:
    (written,) = events.Scalars("freezing/tokens_per_second")
    assert (written.step, written.value) == (1, 100.0)
    assert re.search(r"[()]", THROUGHPUT[0])


def test_a_run_on_pictures_counts_them_in_every_tag(tmp_path: Path) -> None:
    pictures = config()
    pictures.model.name = "vit"
    board = RunTensorBoard(str(tmp_path), run_in(tmp_path, config=pictures))
    logged = ("throughput(tps)", "freezing/emulation/virtual_tokens_per_second", "grad_norm")
    board.log(dict.fromkeys(logged, 100.0), 1)
    board.finish(make_summary(tokens_per_second=250.0))
    board.close()
    tags = {tag for tag in events_of(tmp_path).Tags()["scalars"] if not tag.endswith("seconds")}
    assert tags == {
        "throughput(images_per_second)", "freezing/images_per_second", "grad_norm",
        "freezing/emulation/virtual_images_per_second", "freezing/final/images_per_second",
    }  # fmt: skip
    ((title, (_, patterns)), *_) = custom_scalars("images")["speed"].items()
    assert title == "images/s per device"
    drawn = {tag for tag in tags for pattern in patterns if re.match(pattern, tag)}
    assert drawn == {
        "freezing/images_per_second", "freezing/emulation/virtual_images_per_second"
    }  # fmt: skip


def hparams_of(events: EventAccumulator, name: str) -> plugin_data_pb2.HParamsPluginData:
    content = events.SummaryMetadata(f"_hparams_/{name}").plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content)


def test_runs_can_be_told_apart_by_their_settings(events: EventAccumulator) -> None:
    values = hparams_of(events, "session_start_info").session_start_info.hparams
    assert values["freezing.method"].string_value == "timelyfreeze"
    assert values["freezing.max_freeze_ratio"].string_value == "[0.5, 0.8]"
    assert values["training.steps"].number_value == config().training.steps
    assert values["emulation.enable"].bool_value is False
    experiment = hparams_of(events, "experiment").experiment
    assert "freezing/final/tokens_per_second" in [m.name.tag for m in experiment.metric_infos]
    end = hparams_of(events, "session_end_info").session_end_info
    assert end.status == 1  # success


def test_what_a_run_ended_with_is_there_as_far_as_it_is_known(events: EventAccumulator) -> None:
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("freezing/final/")]
    assert sorted(tags) == [
        "freezing/final/kappa_over_p_eff",
        "freezing/final/seconds",
        "freezing/final/tokens_per_second",
    ]
    (speed,) = events.Scalars("freezing/final/tokens_per_second")
    assert (speed.step, speed.value) == (90, 250.0)


def test_metrics_that_do_not_exist_are_left_out(events: EventAccumulator) -> None:
    assert "throughput(tps)" in events.Tags()["scalars"]
    assert "mfu(%)" not in events.Tags()["scalars"]


def test_settings_that_have_no_say_are_left_out() -> None:
    plain = JobConfig()
    assert not [name for name in hyperparameters(plain) if name.startswith("parallelism")]
    assert hyperparameters(plain)["freezing.method"] == "none"
    assert "freezing.last_warmup_step" not in hyperparameters(plain)
    policy = JobConfig()
    put(policy, "freezing", method="apf")
    assert "freezing.max_freeze_ratio" not in hyperparameters(policy)
    assert "freezing.last_warmup_step" in hyperparameters(policy)


def tags_of(
    phase: Phase, metrics: CollectedMetrics, predicted_ms: float | None = None
) -> dict[str, float]:
    controller = SimpleNamespace(
        expected_stage_ratios=lambda: {0: 0.5, 1: 0.25}, expected_batch_ms=lambda: predicted_ms
    )
    return log_step(BatchTimes(run_in(controller=controller)), 1, 5.0, phase, metrics)


def test_what_is_known_has_a_tag() -> None:
    metrics = CollectedMetrics(
        {Phase.STABLE: (90.0, 110.0, 100.0), Phase.RAMP: (7.0,)},
        {0: 0.4},
        0.3,
        score_ms_per_step=1.5,
        score_bytes=2**20,
        policy={"frozen_layers": 2.0},
        drift=1.25,
    )
    assert tags_of(Phase.STABLE, metrics, 80.0) == {
        "freezing/phase": 4.0,
        "freezing/average_ratio": 0.3,
        "freezing/planned_ratio/stage_0": 0.5,
        "freezing/planned_ratio/stage_1": 0.25,
        "freezing/applied_ratio/stage_0": 0.4,
        "freezing/policy/frozen_layers": 2.0,
        "freezing/score_time_ms": 1.5,
        "freezing/score_memory_mib": 1.0,
        "freezing/batch_ms/measured": 100.0,
        "freezing/batch_ms/predicted": 80.0,
        "freezing/drift": 1.25,
    }


@pytest.mark.parametrize(("saved_ms", "told"), [(None, {}), (9.5, {"saved_ms": 9.5})])
def test_a_cache_has_tags_of_its_own(saved_ms: float | None, told: dict[str, float]) -> None:
    use = CacheUse(8, 5, 2**20, 3 * 2**20, 1.5, saved_ms, 7)
    logged = tags_of(Phase.STABLE, CollectedMetrics({}, {}, 0.0, cache=use))
    tags = {"entered_batches": 5.0, "read_ahead_rows": 7.0, "spent_ms": 1.5, **told}
    tags |= {"memory_mib": 1.0, "disk_mib": 3.0}
    cache = {tag: value for tag, value in logged.items() if "cache" in tag}
    assert cache == {f"freezing/cache/{name}": value for name, value in tags.items()}


def test_what_is_not_known_has_none() -> None:
    metrics = CollectedMetrics({Phase.RAMP: (7.0,)}, {}, 0.0)
    assert tags_of(Phase.WARMUP, metrics) == {
        "freezing/phase": 0.0,
        "freezing/average_ratio": 0.0,
        "freezing/planned_ratio/stage_0": 0.5,
        "freezing/planned_ratio/stage_1": 0.25,
    }


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_a_number_of_its_own(phase: Phase) -> None:
    assert list(PHASE_NUMBERS.values()).count(PHASE_NUMBERS[phase]) == 1
