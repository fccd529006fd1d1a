"""What a run writes of its batches, with ranks in threads and times by hand."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.timelyfreeze.helpers.ranks import Hub, ThreadExchange
from tests.torchtitan.helpers.report_runs import end_step, log_step, run_in
from tests.torchtitan.helpers.summaries import make_summary
from timelyfreeze.records.tables import ResponseRow
from timelyfreeze.records.timeline import timeline_file, timeline_from_json
from timelyfreeze.runtime import ObservedBatch
from timelyfreeze.schedule.order import parse_action, parse_order
from timelyfreeze.settings.phases import Phase, Step
from timelyfreeze.timing.monitoring import BatchRecord
from torchtitan.freezing.report.batches import Padding, Responses, Timelines, typical

ORDER = parse_order(["0F0 0B0", "1F0 1B0"])


def observed(
    rank: int,
    step: int,
    phase: Phase,
    slow_ms: float = 0.0,
    *,
    is_cold: bool = False,
    entry_stage: int | None = None,
) -> ObservedBatch:
    """F takes 1 ms, B 2, the last one more; the batch 6 ms and more, of which rank 1 sees 3."""
    times = [
        {"0F0": (0.0, 1.0), "0B0": (4.0, 6.0 + slow_ms)},
        {"1F0": (0.0, 1.0), "1B0": (1.0, 3.0)},
    ][rank]
    intervals = {parse_action(text): interval for text, interval in times.items()}
    durations = {action: end - start for action, (start, end) in intervals.items()}
    fractions = {action: 0.5 for action in intervals if action.kind.freezable}
    span_ms = max(end for _, end in intervals.values())
    return ObservedBatch(
        step,
        phase,
        is_cold,
        BatchRecord(durations, span_ms, intervals),
        fractions,
        entry_stage=entry_stage,
    )


class Ranks:
    """The timelines of two ranks; the second one writes, as in a pipeline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hub = Hub(2)
        controller: Any = SimpleNamespace(
            active_plan=SimpleNamespace(order=ORDER, bounds=None), step=Step()
        )
        self.parts = [
            Timelines(
                run_in(
                    folder,
                    is_shown=rank == 1,
                    controller=controller,
                    exchange=ThreadExchange(hub, rank),
                )
            )
            for rank in range(2)
        ]
        for part in self.parts:
            part.begin_pipeline()

    def add(self, step: int, phase: Phase, slow_ms: float = 0.0, **more: Any) -> None:
        for rank, part in enumerate(self.parts):
            part.batch(observed(rank, step, phase, slow_ms, **more))

    def collect(self, *, is_last: bool = False) -> bool:
        """Returns whether there was something to write."""
        with ThreadPoolExecutor(2) as pool:
            for part in self.parts:
                part.run.has_news = False
            list(pool.map(lambda part: part.gather() if is_last else log_step(part, 1), self.parts))
        found = [part.run.has_news for part in self.parts]
        assert found[0] == found[1]
        return found[0]

    def begin_plan(self) -> None:
        of_plan: Any = None
        for part in self.parts:
            part.begin_plan(of_plan, of_plan)

    def written(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "timelines").glob("*"))


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_a_phase_is_written_once_the_next_has_begun(ranks: Ranks) -> None:
    ranks.add(1, Phase.UPPER_BOUND)
    assert not ranks.collect()
    ranks.add(2, Phase.LOWER_BOUND)
    assert ranks.collect()
    assert ranks.written() == ["measured_upper_bound.json"]
    assert not ranks.collect()
    assert ranks.collect(is_last=True)
    assert ranks.written() == ["measured_lower_bound.json", "measured_upper_bound.json"]


def test_the_pass_with_the_median_time_is_put_together_from_all_ranks(ranks: Ranks) -> None:
    for step, slow_ms in enumerate([5.0, 0.25, 1.0, 40.0, 0.5], start=1):
        ranks.add(step, Phase.UPPER_BOUND, slow_ms)
    ranks.collect(is_last=True)
    file = timeline_file(ranks.folder, Phase.UPPER_BOUND)
    timeline = timeline_from_json(file.read_text())
    assert (timeline.step, timeline.batch_ms) == (3, 7.0)
    assert [(str(b.action), b.start_ms, b.end_ms, b.freeze_ratio) for b in timeline.blocks] == [
        ("0F0", 0.0, 1.0, 0.0),
        ("0B0", 4.0, 7.0, 0.5),
        ("1F0", 1.0, 2.0, 0.0),
        ("1B0", 2.0, 4.0, 0.5),
    ]


@pytest.mark.parametrize(("n_entered", "shown"), [(2, (None, 2)), (3, (1, 5)), (4, (1, 4))])
def test_the_pass_that_is_shown_began_where_most_did(
    ranks: Ranks, n_entered: int, shown: tuple[int | None, int]
) -> None:
    """Of 6 passes, each slower than the one before. Of as many of each kind, the later count."""
    for step in range(1, 7):
        entry_stage = 1 if step > 6 - n_entered else None
        ranks.add(step, Phase.STABLE, float(step), entry_stage=entry_stage)
    ranks.collect(is_last=True)
    timeline = timeline_from_json(timeline_file(ranks.folder, Phase.STABLE).read_text())
    assert (timeline.entry_stage, timeline.step) == shown, "the median of its kind"
    assert timeline.is_passed(parse_action("0F0")) == (shown[0] == 1)


def test_cold_passes_and_the_ramp_are_no_examples(ranks: Ranks) -> None:
    ranks.add(1, Phase.UPPER_BOUND, is_cold=True)
    ranks.add(2, Phase.RAMP)
    assert not ranks.collect(is_last=True)
    assert ranks.written() == []


def test_a_phase_without_end_is_written_when_there_are_enough_passes(ranks: Ranks) -> None:
    for step in range(1, 8):
        ranks.add(step, Phase.STABLE)
        assert not ranks.collect()
    ranks.add(8, Phase.STABLE)
    assert ranks.collect()
    for step in range(9, 30):
        ranks.add(step, Phase.STABLE)
        assert not ranks.collect(), "once is enough until it ends"


@pytest.mark.parametrize("is_switched_off", [False, True])
def test_at_its_end_a_phase_without_end_is_shown_by_its_last_passes(
    ranks: Ranks, *, is_switched_off: bool
) -> None:
    for step in range(1, 40):
        ranks.add(step, Phase.STABLE, slow_ms=0.0 if step > 20 else 3.0)
        ranks.collect()
    file = timeline_file(ranks.folder, Phase.STABLE)
    assert timeline_from_json(file.read_text()).batch_ms == 9.0
    if is_switched_off:
        ranks.add(40, Phase.OFF)
    assert ranks.collect(is_last=not is_switched_off)
    assert timeline_from_json(file.read_text()).batch_ms == 6.0
    assert ranks.written() == ["measured_stable.json"]
    assert not ranks.collect()


def test_the_stable_phase_is_measured_anew_under_another_plan(ranks: Ranks) -> None:
    for step in range(1, 9):
        ranks.add(step, Phase.STABLE)
    ranks.collect()
    ranks.begin_plan()
    ranks.add(9, Phase.STABLE, 2.0)
    assert ranks.collect(is_last=True)
    assert ranks.written() == ["measured_stable.json", "measured_stable_1.json"]
    file = timeline_file(ranks.folder, Phase.STABLE)
    assert timeline_from_json(file.read_text()).batch_ms == 8.0


def test_only_the_last_passes_are_kept(ranks: Ranks) -> None:
    for step in range(1, 100):
        ranks.add(step, Phase.WARMUP, slow_ms=0.0 if step > 60 else 1000.0)
    ranks.collect(is_last=True)
    file = timeline_file(ranks.folder, Phase.WARMUP)
    assert timeline_from_json(file.read_text()).batch_ms == 6.0


def test_passes_that_make_no_pipeline_are_one_warning(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    for part in ranks.parts:
        part.batch(observed(0, 1, Phase.WARMUP))  # nobody has seen the second stage
    assert ranks.collect(is_last=True)
    assert "no timeline of phase warmup" in caplog.text
    assert ranks.written() == []


def test_typical_is_the_median_as_the_slowest_rank_saw_it() -> None:
    assert typical([[5.0, 1.0, 2.0], [1.0, 9.0, 3.0]]) == 0
    assert typical([[4.0, 3.0, 2.0, 1.0]]) == 2, "of two in the middle the shorter"


def observed_backwards(
    step: int, phase: Phase = Phase.STABLE, *, is_cold: bool = False
) -> ObservedBatch:
    """A forward and two backwards; the first takes as many milliseconds as the step's number."""
    times = {"1F0": 1.0, "1B0": float(step), "1B1": 0.5}
    durations = {parse_action(text): ms for text, ms in times.items()}
    fractions = {parse_action("1B0"): 0.25, parse_action("1B1"): 0.75}
    record = BatchRecord(durations_ms=durations, intervals_ms={}, span_ms=9.0)
    return ObservedBatch(step, phase, is_cold, record, fractions)


def test_backwards_are_kept_with_what_was_frozen_of_them() -> None:
    sample = Responses(run_in())
    sample.begin_pipeline()
    sample.batch(observed_backwards(7))
    sample.batch(observed_backwards(8, is_cold=True))
    assert sample.kept == {
        (1, "B", "stable"): [
            ResponseRow(1, "B", "stable", 0, 0.25, 7.0),
            ResponseRow(1, "B", "stable", 1, 0.75, 0.5),
        ]
    }


def test_a_long_run_keeps_a_bounded_fair_and_repeatable_sample() -> None:
    def sampled() -> list[ResponseRow]:
        sample = Responses(run_in())
        sample.n_kept = 100
        sample.begin_pipeline()
        for step in range(1, 2001):
            sample.batch(observed_backwards(step))
        sample.batch(observed_backwards(3, Phase.RAMP))
        return [row for key in sorted(sample.kept) for row in sample.kept[key]]

    rows = sampled()
    assert rows == sampled()
    assert [row.phase for row in rows].count("stable") == 100
    assert [row.phase for row in rows].count("ramp") == 2, "phases do not crowd each other out"
    steps = [row.duration_ms for row in rows if row.microbatch == 0 and row.phase == "stable"]
    assert 700 < np.mean(steps) < 1300, "neither the first nor the last only"


# -- padding ---------------------------------------------------------------------------------------


def told_of(
    caplog: pytest.LogCaptureFixture,
    steps: list[list[tuple[int, int]]],
    *,
    is_shown: bool = True,
    **known: Any,
) -> tuple[list[str], float | None, str | None]:
    """What is logged while steps read so many tokens and padding; the share, and what is said."""
    caplog.set_level("INFO")
    caplog.clear()
    start = make_summary(**known)
    part = Padding(run_in(start=start, is_shown=is_shown))
    for step, batches in enumerate(steps, start=1):
        for n_tokens, n_padding in batches:
            part.read(n_tokens, n_padding)
        end_step(part, step, None, 1.0)
    found = replace(start, **part.fields(start))
    return [record.getMessage() for record in caplog.records], found.padding, found.padding_told


def test_much_padding_is_told_once_at_the_start_and_counted_over_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told, share, at_end = told_of(caplog, [[(100, 90), (100, 60)], [(200, 100)]])
    assert told == [
        "75% of the tokens are padding; data.packing = true would put up to 4.0 times as many "
        "examples into a sequence"
    ]
    assert share == 250 / 400
    assert at_end is not None
    assert at_end.startswith("62% of the tokens are padding; ")
    assert told_of(caplog, [[(100, 90)]], is_shown=False)[0] == []


@pytest.mark.parametrize(
    ("steps", "known", "share"),
    [
        ([[(100, 10)]], {}, 0.1),
        ([[(100, 50)]], {"packing": True}, 0.5),
        ([[], []], {}, None),  # pictures and plain text: nothing is counted
    ],
)
def test_little_padding_and_packed_and_other_data_say_nothing(
    caplog: pytest.LogCaptureFixture,
    steps: list[list[tuple[int, int]]],
    known: dict[str, Any],
    share: float | None,
) -> None:
    assert told_of(caplog, steps, **known) == ([], share, None)


def test_all_processes_count() -> None:
    others: Any = SimpleNamespace(all_gather=lambda value: [value, (300, 200)])
    part = Padding(run_in(exchange=others))
    part.read(100, 0)
    assert part.fields(make_summary()) == {"padding": 0.5}
