"""What a profile becomes: bounds, overheads and files; and the command that writes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.helpers.debug_model import N_LAYERS, config, toml_text
from timelyfreeze.cli.plan import main as plan_main
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import ActionKind, order_from_csv
from timelyfreeze.timing.bounds import bounds_from_json
from timelyfreeze.whatif.bounds_file import read_bounds_file
from timelyfreeze.whatif.partition import PartParameters
from torchtitan.freezing.profile.bench import Point, Response, fit_line, spread
from torchtitan.freezing.profile.command import main
from torchtitan.freezing.profile.profile import (
    Profile,
    bounds_text,
    profile_bounds,
    profile_overheads,
    stage_times,
)
from torchtitan.settings.layout import pipeline_order

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("installed")]

F, B, I, W = ActionKind  # noqa: E741


def response(stage: int | None, n_layers: int, f: float, b: tuple[float, float], mode: Any = None):
    """Measured thrice: medians f, b unfrozen and frozen; I of 1 and W of b less 1."""

    def points(offset: float) -> tuple[Point, ...]:
        return tuple(
            Point(r, (r,) * 3, (ms - offset, ms - offset + 5.0, max(ms - offset - 0.5, 0.0)))
            for r, ms in ((0.0, b[0]), (1.0, b[1]))
        )

    curves = {B: points(0.0), W: points(1.0)}
    return Response(stage, n_layers, mode, (f, f + 9.0, f), (1.0, 1.0, 8.0), curves)


@pytest.fixture
def by_hand() -> Profile:
    job_config = config(parallelism__pipeline_parallel_degree=2)
    return Profile(
        order=pipeline_order(job_config, N_LAYERS),
        n_layers=N_LAYERS,
        responses=(
            response(0, 3, 3.5, (7.0, 1.0), "all_or_nothing"),
            response(0, 3, 3.5, (7.5, 4.0), "per_tensor"),
            response(1, 3, 6.0, (12.0, 6.0)),
        ),
        probes=(response(None, 1, 1.5, (3.0, 1.75)), response(None, 3, 3.5, (7.0, 3.75))),
        peak_bytes=(-1, -1),
    )


def test_bounds_are_medians(by_hand: Profile) -> None:
    dag, bounds = profile_bounds(by_hand)
    for action, low, high in zip(dag.actions, bounds.min_ms, bounds.max_ms, strict=True):
        wanted = {
            (0, F): (3.5, 3.5), (1, F): (6.0, 6.0), (0, B): (1.0, 7.0), (1, B): (6.0, 12.0),
        }  # fmt: skip
        assert (low, high) == wanted[action.stage, action.kind], action
    _, kept = profile_bounds(by_hand, "per_tensor")
    assert sorted(set(kept.min_ms)) == [3.5, 4.0, 6.0]


def test_overheads_of_layers(by_hand: Profile) -> None:
    layer, fixed = profile_overheads(by_hand)
    assert (layer.forward_ms, fixed.forward_ms) == (1.0, 0.5)
    assert (layer.backward_ms, fixed.backward_ms) == (2.0, 1.0)
    assert (layer.frozen_backward_ms, fixed.frozen_backward_ms) == (1.0, 0.75)


def test_a_backward_that_is_no_faster_frozen_is_not(by_hand: Profile) -> None:
    slow = response(1, 3, 6.0, (12.0, 12.5))
    times = stage_times(slow)
    assert (times.frozen_backward_ms, times.backward_ms) == (12.0, 12.0)
    pinned = replace(by_hand, responses=(*by_hand.responses[:2], slow))
    _, bounds = profile_bounds(pinned)
    assert {a.stage for a in bounds.pinned} == {1}


def test_the_bounds_file_notes_what_planning_needs(by_hand: Profile, tmp_path: Path) -> None:
    job_config = config(parallelism__pipeline_parallel_degree=2)
    path = tmp_path / "bounds.json"
    path.write_text(bounds_text(by_hand, job_config, profile_overheads(by_hand)))
    file = read_bounds_file(path)
    assert (file.metadata.schedule, file.metadata.ranks, file.metadata.layers) == (
        "1F1B",
        2,
        (3, 3),
    )
    assert file.metadata.tokens_per_microbatch == 32
    assert file.metadata.first_stage == "all_or_nothing"
    assert file.stage_times()[1].input_ms == 1.0
    assert file.stage_times()[1].weight_ms == 11.0
    assert file.derived_kinds == ""
    assert file.metadata.processors is None
    path.write_text(bounds_text(replace(by_hand, n_processors=1.5), job_config, None))
    again = read_bounds_file(path)
    assert (again.metadata.layer, again.metadata.processors) == (None, 1.5)


def test_two_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tmp_path / "tiny.toml"
    toml.write_text(toml_text())
    folder = tmp_path / "profile"
    arguments = [str(toml), "--output", str(folder), "--ratios", "0.5", "--warmup", "0",
                 "--repeats", "2", "--", "--freezing.first_stage=per_tensor"]  # fmt: skip
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "debugmodel, 1F1B over 3 ranks, 4 microbatches of 2 x 16 tokens" in text
    for name in ("| 0 all_or_nothing |", "| 0 per_tensor |", "| 1 |", "| 2 |", "| probe |"):
        assert text.count(f"\n{name}") == 2, "B and W"
    order = order_from_csv((folder / "schedule.csv").read_text())
    dag = build_dag(order)
    bounds_from_json(dag, (folder / "bounds.json").read_text())
    about = json.loads((folder / "response.json").read_text())
    assert (about["cold_rounds"], about["kept_rounds"]) == (0, 2)
    assert [s["stage"] for s in about["stages"]] == [0, 0, 1, 2]
    kept = about["stages"][1]["curves"]["B"]
    assert [p["ratio"] for p in kept["points"]] == [0.0, 0.5, 1.0]
    assert set(kept["line"]) >= {"largest_miss", "fit_residual_ms", "r_squared"}
    assert json.loads((folder / "settings.json").read_text())["training"]["seq_len"] == 16
    notes = read_bounds_file(folder / "bounds.json").metadata
    assert notes.first_stage == "per_tensor"
    # Of the debugmodel: a vocabulary of 2048, width 256, and a norm at the end.
    assert notes.parameters == PartParameters(524_288, (852_480,) * 6, 524_288 + 256)
    assert notes.memory is not None
    assert notes.memory.message == 2 * 16 * 256 * 4

    # Overheads of layers are measured, and on a busy machine may contradict each other; the
    # measured split is planned for in any case.
    assert plan_main([str(folder / "bounds.json"), "--schedules", "1F1B", "GPipe"]) == 0
    assert "shortest step with freezing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--", "--parallelism.tensor_parallel_degree=2"],
            "parallelism.tensor_parallel_degree is 2",
        ),
        (
            ["--", "--parallelism.pipeline_parallel_degree=1"],
            "it must be the number of ranks, 2 or more",
        ),
        (["--", "--parallelism.pipeline_parallel_microbatch_size=3"], "(3) must divide"),
        (
            ["--", "--parallelism.pipeline_parallel_schedule=2F2B"],
            "schedule is '2F2B'; known: GPipe",
        ),
        (["--", "--model.flavor=nosuch"], "model.flavor is 'nosuch'"),
        (["--", "--model.flavor=debugmodel_flex_attn"], "has flex attention"),
        (["--data.packing"], "data.packing is true"),
        (["--", "--freezing.first_stage=odd"], "freezing.first_stage is 'odd'"),
    ],
)
def test_what_is_not_covered_is_an_error(
    tmp_path: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = tmp_path / "tiny.toml"
    toml.write_text(toml_text())
    assert main([str(toml), "--output", str(tmp_path / "out"), *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ratios", "1.5"], "--ratios: '1.5' is given; it must be a number, 0 or more and at "),
        (["--repeats", "0"], "--repeats: '0' is given; it must be a whole number, 1 or more"),
        (["--warmup", "-1"], "--warmup: '-1' is given; it must be a whole number, 0 or more"),
    ],
)
def test_a_wrong_option_is_told_before_anything_starts(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tiny.toml", *arguments])
    assert expected in capsys.readouterr().err


def point(ratio: float, *times_ms: float, fraction: float | None = None) -> Point:
    return Point(ratio, (ratio if fraction is None else fraction,) * len(times_ms), times_ms)


def test_a_straight_line_is_one() -> None:
    line = fit_line([point(r, 10.0 - 6.0 * r) for r in (0.0, 0.25, 0.5, 1.0)])
    assert (line.unfrozen_ms, line.frozen_ms) == (10.0, 4.0)
    assert line.largest_miss_ms == pytest.approx(0.0, abs=1e-12)
    assert (line.fit_unfrozen_ms, line.fit_frozen_ms) == (pytest.approx(10.0), pytest.approx(4.0))
    assert line.fit_residual_ms == pytest.approx(0.0, abs=1e-12)
    assert line.r_squared == pytest.approx(1.0)


def test_the_farthest_point_from_the_assumed_line() -> None:
    # On the line from 10 to 4: 7 at 0.5, 5.5 at 0.75. The best line through (0, 10), (0.5, 9),
    # (0.75, 5), (1, 4), by hand: mean share 0.5625, mean 7, slope -3.625 / 0.546875.
    points = [point(0.0, 10.0), point(0.5, 9.0), point(0.75, 5.0), point(1.0, 4.0)]
    line = fit_line(points)
    assert line.largest_miss_ms == pytest.approx(2.0)
    assert line.largest_miss == pytest.approx(0.2)
    slope = ((-0.5625 * 3) + (-0.0625 * 2) + (0.1875 * -2) + (0.4375 * -3)) / 0.546875
    assert line.fit_frozen_ms - line.fit_unfrozen_ms == pytest.approx(slope)
    assert line.fit_unfrozen_ms == pytest.approx(7.0 - 0.5625 * slope)
    residuals = [y - 7.0 - slope * (x - 0.5625) for x, y in [(0, 10), (0.5, 9), (0.75, 5), (1, 4)]]
    assert line.fit_residual_ms == pytest.approx(max(map(abs, residuals)))
    assert line.r_squared == pytest.approx(1.0 - sum(r * r for r in residuals) / 26.0)


def test_a_miss_below_the_line_is_negative() -> None:
    line = fit_line([point(0.0, 10.0), point(0.5, 4.0), point(1.0, 4.0)])
    assert line.largest_miss_ms == pytest.approx(-3.0)


def test_the_fraction_that_was_frozen_counts_and_not_the_ratio() -> None:
    line = fit_line([point(0.0, 10.0), point(0.5, 8.0, fraction=0.2), point(1.0, 0.0)])
    assert line.largest_miss_ms == pytest.approx(0.0)


def test_medians_are_compared() -> None:
    line = fit_line([point(0.0, 10.0, 11.0, 90.0), point(1.0, 4.0, 0.0, 5.0)])
    assert (line.unfrozen_ms, line.frozen_ms) == (11.0, 4.0)
    assert (line.largest_miss_ms, line.largest_miss) == (0.0, 0.0)


def test_flat_responses_are_explained() -> None:
    line = fit_line([point(0.0, 3.0), point(0.5, 3.0), point(1.0, 3.0)])
    assert (line.r_squared, line.fit_residual_ms) == (1.0, pytest.approx(0.0, abs=1e-12))
    assert fit_line([point(0.0, 0.0), point(1.0, 0.0)]).largest_miss == 0.0


def test_spread_of_measurements() -> None:
    found = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert found == {"median_ms": 3.0, "quartiles_ms": (2.0, 4.0), "n": 5}


def test_ends_of_a_response() -> None:
    kind = ActionKind.FULL_BACKWARD
    curve = (point(0.0, 10.0, 12.0), point(0.5, 7.0), point(1.0, 4.0))
    response = Response(1, 3, None, (1.0,), (), {kind: curve})
    assert response.ends(kind) == ((4.0,), (10.0, 12.0))
