"""What the plot of a batch shows, read back from the figure; no pixels are compared."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from timelyfreeze.planning.plan import plan_from_ratios
from timelyfreeze.plots.style import MOST_PNG_BYTES, save
from timelyfreeze.plots.timeline import batch_title, timeline_figure, tint
from timelyfreeze.records.timeline import PREDICTED, Block, Timeline, predicted_timelines
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import (
    ActionKind,
    ScheduleOrder,
    one_f_one_b_order,
    parse_action,
    parse_order,
)
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.bounds import uniform_bounds

INTERLEAVED = parse_order(
    [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 3W1 1B0 1B1",
    ]
)


def both(order: ScheduleOrder) -> tuple[Timeline, Timeline]:
    """Without freezing, and with half of every freezable action frozen."""
    dag = build_dag(order)
    kinds = {action.kind for action in dag.actions}
    bounds = uniform_bounds(
        dag,
        forward_ms=1.0,
        backward_ms=(1.0, 2.0),
        **(
            {"input_ms": 1.0, "weight_ms": (0.1, 1.0)} if ActionKind.INPUT_BACKWARD in kinds else {}
        ),
    )
    return predicted_timelines(dag, bounds, plan_from_ratios(dag, bounds, 0.5 * dag.freezable))


def numbers(figure: Figure, row: int) -> list[str]:
    return sorted(text.get_text() for text in figure.axes[row].texts if text.get_text().isdigit())


def boxes(
    figure: Figure, row: int, **look: tuple[float, ...]
) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of the boxes of a colour or an edge colour."""
    found = []
    for patch in figure.axes[row].patches:
        if isinstance(patch, PathPatch) and all(
            np.allclose(getattr(patch, f"get_{key}")(), (*value, 1.0))
            for key, value in look.items()
        ):
            corners = patch.get_path().vertices.reshape(-1, 5, 2)
            found += [(c[:, 0].min(), c[:, 0].max(), c[:, 1].min(), c[:, 1].max()) for c in corners]
    return sorted(found)


@pytest.mark.parametrize("order", [one_f_one_b_order(4, 8), INTERLEAVED], ids=["1F1B", "V"])
def test_every_action_has_a_box_at_its_time_in_its_lane(order: ScheduleOrder) -> None:
    timelines = both(order)
    figure = timeline_figure(timelines)
    for row, timeline in enumerate(timelines):
        drawn = {
            (round(left, 9), round(right, 9), round((top + bottom) / 2, 9))
            for color in {tint(block.action.kind, block.freeze_ratio) for block in timeline.blocks}
            for left, right, top, bottom in boxes(figure, row, facecolor=color)
        }
        expected = {
            (round(b.start_ms, 9), round(b.end_ms, 9), float(b.rank)) for b in timeline.blocks
        }
        assert expected <= drawn


def test_microbatch_numbers_stand_on_the_blocks() -> None:
    figure = timeline_figure(both(one_f_one_b_order(4, 8)))
    for row in (0, 1):
        assert numbers(figure, row) == sorted(str(m) for m in range(8) for _ in range(8))


@pytest.mark.slow
def test_numbers_are_left_out_where_blocks_are_too_narrow() -> None:
    """At 16 by 64 backwards have room for two digits and forwards, half as wide, have not."""
    figure = timeline_figure(both(one_f_one_b_order(16, 64))[:1])
    assert numbers(figure, 0) == sorted(str(m) for m in range(64) for _ in range(16))
    sizes = {text.get_fontsize() for text in figure.axes[0].texts if text.get_text().isdigit()}
    assert min(sizes) >= 5.0


def test_the_critical_path_is_outlined_stretch_by_stretch() -> None:
    """1F1B of 2 by 2: 0F0 | 1F0 1B0 1F1 1B1 | 0B1, each stretch one box, joined by lines."""
    timeline, _ = both(parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]))
    figure = timeline_figure([timeline])
    outlines = boxes(figure, 0, edgecolor=(0.0, 0.0, 0.0))
    assert [(left, right, (t + b) / 2) for left, right, t, b in outlines if b - t > 0.5] == [
        (0.0, 1.0, 0.0),
        (1.0, 7.0, 1.0),
        (7.0, 9.0, 0.0),
    ]
    (lines,) = figure.axes[0].collections
    assert [segment[:, 0].tolist() for segment in lines.get_segments()] == [[1.0, 1.0], [7.0, 7.0]]


def test_titles_compare_with_the_first_batch() -> None:
    before, after = both(parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]))
    assert batch_title(before, None) == "Predicted, without freezing: batch 9 ms, bubbles 33.3%"
    assert batch_title(after, before) == (
        "Predicted, with freezing: batch 7.5 ms (+20.0% throughput), bubbles 33.3%"
    )
    figure = timeline_figure([before, after], "1F1B")
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        batch_title(before, None),
        batch_title(after, before),
    ]
    idle = [text.get_text() for text in figure.axes[0].texts if "idle" in text.get_text()]
    assert idle == ["33% idle", "33% idle"]


def test_the_end_without_freezing_is_drawn_over_the_blocks() -> None:
    figure = timeline_figure(both(parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])))
    (end,) = figure.axes[1].lines
    assert end.get_xdata()[0] == 9.0
    assert end.get_zorder() > max(drawn.get_zorder() for drawn in figure.axes[1].collections)


def test_names_stand_in_titles_and_what_freezes_is_no_reference() -> None:
    before, after = both(parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]))
    figure = timeline_figure([after, after, before], names=["apf", "lisa", "none"])
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "apf: batch 7.5 ms, bubbles 33.3%",
        "lisa: batch 7.5 ms, bubbles 33.3%",
        "none: batch 9 ms, bubbles 33.3%",
    ]
    assert [len(ax.lines) for ax in figure.axes] == [0, 0, 0], "no end to be compared with"
    assert not any("end" in text.get_text() for text in figure.legends[0].get_texts())
    figure = timeline_figure([before, after, after], names=["none", "apf", "lisa"])
    assert figure.axes[2].get_title(loc="left") == (
        "lisa: batch 7.5 ms (+20.0% throughput), bubbles 33.3%"
    )
    assert [ax.lines[0].get_xdata()[0] for ax in figure.axes[1:]] == [9.0, 9.0]
    assert batch_title(before, None, 71 * "n") == 71 * "n" + ":\nbatch 9 ms, bubbles 33.3%"


def test_many_batches_have_lower_lanes() -> None:
    timelines = both(one_f_one_b_order(4, 8))
    heights = [timeline_figure(timelines * n).get_figheight() for n in (1, 3, 6)]
    # A head, and for each batch its title and four lanes of 0.42 inches; for 12 batches of 10 / 48.
    assert heights == pytest.approx(
        [1.15 + 2 * 2.1, 1.15 + 6 * (0.42 + 10 / 6), 1.15 + 12 * (0.42 + 10 / 12)]
    )


def test_both_batches_have_one_time_axis() -> None:
    figure = timeline_figure(both(one_f_one_b_order(4, 8)))
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


def test_the_more_is_frozen_the_paler_a_block() -> None:
    def brightness(kind: str, ratio: float) -> float:
        return sum(tint(parse_action(f"0{kind}0").kind, ratio))

    for kind in "BW":
        shades = [brightness(kind, ratio) for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
        assert shades == sorted(set(shades))
        assert shades[-1] < 3.0, "still to be told from white paper"


def test_later_stages_of_a_rank_have_a_foot_bar() -> None:
    timelines = both(INTERLEAVED)
    figure = timeline_figure(timelines)
    bars = [box for box in boxes(figure, 0) if box[3] - box[2] < 0.2]
    later = [b for b in timelines[0].blocks if b.action.stage >= 2]
    assert sorted({(left, right) for left, right, _, _ in bars}) == sorted(
        {(b.start_ms, b.end_ms) for b in later}
    )
    by_time = {(b.start_ms, b.end_ms, b.rank): b for b in later}
    for left, right, top, bottom in bars:
        block = by_time[left, right, round((top + bottom) / 2)]
        (box,) = [
            b
            for b in boxes(figure, 0, facecolor=tint(block.action.kind, block.freeze_ratio))
            if b[:2] == (left, right) and round((b[2] + b[3]) / 2) == block.rank
        ]
        assert bottom == pytest.approx(box[3]), "it stands on the foot of its block"
    (legend,) = figure.legends
    assert "foot bar: second stage of its rank" in [t.get_text() for t in legend.get_texts()]


def test_backwards_that_are_too_short_to_see_are_counted() -> None:
    """A stage that is frozen whole and sends no gradient has backwards that take no time."""
    plain, frozen = both(one_f_one_b_order(2, 4))
    gone = [
        replace(block, end_ms=block.start_ms)
        if block.action.stage == 0 and block.action.kind.freezable
        else block
        for block in frozen.blocks
    ]
    figure = timeline_figure([plain, replace(frozen, blocks=tuple(gone))])
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "too short to see: 4 backwards with nothing to do" in words
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0.0 <= box.x0 < box.x1 <= figure.bbox.width, "it is not cut"
    (legend,) = timeline_figure([plain, frozen]).legends
    assert not any("too short" in text.get_text() for text in legend.get_texts())


def test_what_a_batch_passed_by_is_not_drawn_and_its_rank_says_why() -> None:
    """1F1B of 4 by 8 that begins at stage 2: ranks 0 and 1 have no block, outline nor number."""
    before, after = both(one_f_one_b_order(4, 8))
    entered = replace(after, entry_stage=2)
    figure = timeline_figure([before, entered])
    axes = figure.axes[1]
    title = "Predicted, with freezing, front computed before: batch"
    assert axes.get_title(loc="left").startswith(title)
    lanes = [box for box in boxes(figure, 1) if round((box[2] + box[3]) / 2) <= 1]
    assert [box[:2] for box in lanes] == 2 * [(0.0, after.batch_ms)], "but for the grey of idling"
    told = [
        t for t in axes.texts if t.get_text() == "nothing of this batch runs: front computed before"
    ]
    assert sorted(text.xy[1] for text in told) == [0.0, 1.0]  # type: ignore[attr-defined]
    assert numbers(figure, 1) == sorted(str(m) for m in range(8) for _ in range(4))
    assert not any("nothing of this batch" in text.get_text() for text in figure.axes[0].texts)
    named = batch_title(entered, before, "fixed")
    assert named.startswith("fixed, front computed before: batch")


def random_timelines(order: ScheduleOrder) -> list[Timeline]:
    """Times and ratios without any regularity, so that nothing in the file repeats."""
    rng = np.random.default_rng(0)
    timelines = []
    for timeline in both(order):
        blocks = tuple(
            Block(
                block.action,
                block.rank,
                block.start_ms + float(rng.uniform(0.0, 0.2)),
                block.end_ms + float(rng.uniform(0.2, 0.4)),
                float(rng.uniform()) if block.action.kind.freezable else 0.0,
                block.is_critical,
            )
            for block in timeline.blocks
        )
        timelines.append(Timeline(PREDICTED, Phase.STABLE, blocks))
    return timelines


@pytest.mark.parametrize(
    ("n_ranks", "n_microbatches"), [(4, 16), pytest.param(16, 64, marks=pytest.mark.long)]
)
def test_many_ranks_and_microbatches_are_drawn_soon_and_in_a_small_file(
    tmp_path: Path, n_ranks: int, n_microbatches: int
) -> None:
    timelines = random_timelines(one_f_one_b_order(n_ranks, n_microbatches))
    began = time.process_time()
    png, svg = save(timeline_figure(timelines, "1F1B"), tmp_path, "large")
    assert time.process_time() - began < 10.0, "the issue's own limit"
    assert png.stat().st_size < MOST_PNG_BYTES
    assert svg.stat().st_size < 3_000_000
