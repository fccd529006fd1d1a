"""``timelyfreeze plan`` of profiler traces: its first sentence, its page, and what it refuses."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.timelyfreeze.whatif.traces_by_hand import bare
from timelyfreeze.cli.plan import main
from timelyfreeze.schedule import gpipe_order

PROFILE = Path(__file__).resolve().parents[3] / "profiles/tiny_8m_1F1B/bounds.json"
LAYERS = (2, 2, 2, 4)  # a layer's forward takes 1 ms, its backward 2 ms
N_MICROBATCHES = 8


def gpipe_ms(layers: tuple[int, ...]) -> float:
    """By GPipe's formula: forwards fill and run at the slowest stage's pace, so do backwards."""
    return 3.0 * (sum(layers) + (N_MICROBATCHES - 1) * max(layers))


@pytest.fixture
def traces(tmp_path: Path) -> list[str]:
    rows = [" ".join(map(str, row)) for row in gpipe_order(4, N_MICROBATCHES).ranks]
    took = {f"{s}F": 1.0 * n for s, n in enumerate(LAYERS)}
    took |= {f"{s}B": 2.0 * n for s, n in enumerate(LAYERS)}
    return list(map(str, bare(tmp_path, rows, took)))


def test_the_first_sentence_tells_the_wait_and_the_split(
    traces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--schedules", "GPipe", "--r-max", "0"]
    assert main([*traces, *asked, "--layers", "2,2,2,4"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    busy, batch_ms = N_MICROBATCHES * 3.0 * sum(LAYERS), gpipe_ms(LAYERS)
    waits = 1.0 - busy / (4 * batch_ms)
    assert first.startswith(f"your pipeline waits {waits:.0%} of its time; a split of ")
    split = tuple(map(int, re.findall(r"\d+", first.split("split of")[1].split("takes")[0])))
    assert (sum(split), max(split), len(split)) == (10, 3, 4)
    assert first.endswith(f"takes off {1.0 - gpipe_ms(split) / batch_ms:.0%}")
    text = " ".join(rest)
    assert f"the measured pipeline without freezing: {batch_ms:.1f} ms a batch" in text
    assert (
        f"{traces[0]} and 3 more: 4 stages, 8 microbatches measured; planning for 4 ranks" in text
    )
    assert "a trace does not tell what freezing saves of a full backward: 40% are taken" in text


def test_the_first_sentence_tells_freezing_where_it_pays(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--schedules", "GPipe", "1F1B", "--layers", "2,2,2,4", "--splits", "balanced"]
    assert main([*traces, *asked, "--json", str(tmp_path / "plan.json")]) == 0
    first, verdict, *_ = capsys.readouterr().out.splitlines()
    cases = json.loads((tmp_path / "plan.json").read_text())["cases"]
    soonest = min(cases, key=lambda case: case["step_ms"] * min(1.0, case["time_to_loss"]))
    assert verdict.startswith("freezing pays")
    off = 1.0 - soonest["frozen_step_ms"] / gpipe_ms(LAYERS)
    assert first.endswith(
        f"freezing ({soonest['schedule']}, 8 microbatches, split balanced, "
        f"r_max {soonest['max_freeze_ratio']}, {soonest['steps_factor']:.2f} times the steps) "
        f"takes off {off:.0%}"
    )
    # A schedule is told where it is faster than the split alone.
    fastest_ms = min(case["step_ms"] for case in cases)
    balanced_ms = gpipe_ms((3, 3, 2, 2))
    assert ("1F1B (" in first.split("freezing")[0]) == (fastest_ms < 0.99 * balanced_ms)


def test_without_layers_no_split_is_told(
    traces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*traces, "--schedules", "GPipe", "--r-max", "0"]) == 0
    text = capsys.readouterr().out.replace("\n", " ")
    assert "; no schedule or split that was asked for takes off 1% " in text
    assert "does not say how many layers a stage has, so only the measured split" in text


def test_the_weight_share_says_what_freezing_saves(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under GPipe everything frozen saves a share of the slowest backwards, and the first ones'."""
    asked = ["--schedules", "GPipe", "--r-max", "1", "--skip-input-grads", "off"]
    file = tmp_path / "plan.csv"
    for share in (0.25, 0.5):
        assert main([*traces, *asked, f"--weight-share={share}", "--csv", str(file)]) == 0
        header, row = file.read_text().splitlines()
        told = dict(zip(header.split(","), row.split(","), strict=True))
        saved = 2.0 * (share * (2 + 2 + N_MICROBATCHES * 4) + 2)
        assert float(told["all_frozen_step_ms"]) == pytest.approx(gpipe_ms(LAYERS) - saved)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([str(PROFILE), "--weight-share=0.5"])
    assert "argument --weight-share: it is of traces" in capsys.readouterr().err


def test_a_broken_trace_and_a_bounds_file_among_traces_are_refused(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*traces, str(PROFILE)]) == 2
    assert f"{PROFILE}: no action is annotated" in capsys.readouterr().err
    (tmp_path / "cut.json").write_text(Path(traces[1]).read_text()[:-30])
    assert main([traces[0], str(tmp_path / "cut.json")]) == 2
    assert "cut.json is not JSON, or was cut off" in capsys.readouterr().err


class Page(HTMLParser):
    """Tags, attributes and texts of a page; tags must close as they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


def page_of(arguments: list[str], tmp_path: Path) -> tuple[Page, str]:
    file = tmp_path / "page.html"
    assert main([*arguments, "--html", str(file)]) == 0
    text = file.read_text()
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text
    page = Page(text)
    assert not page.open
    assert not [a for _, a in page.tags if {"src", "href", "onload"} & set(a)]
    return page, text


def test_the_page_has_every_action_of_both_batches(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--layers", "2,2,2,4", "--schedules", "GPipe", "1F1B", "--splits", "balanced"]
    page, _ = page_of([*traces, *asked], tmp_path)
    said = capsys.readouterr().out
    assert page.texts["h1"] == [said.splitlines()[0]]
    rects = [attributes for tag, attributes in page.tags if tag == "rect"]
    assert len(rects) == 2 * 4 * 2 * N_MICROBATCHES
    titles = [text for text in page.texts["title"] if ": " in text]
    assert len(titles) == len(rects)
    # The last rank of the first batch: 3 stages of 2 ms lie in front of its first forward.
    assert "3F0: forward of microbatch 0 in stage 3, 4.00 ms from 6.00 ms" in titles
    place = titles.index("3F0: forward of microbatch 0 in stage 3, 4.00 ms from 6.00 ms")
    x, width = (float(rects[place][key] or "") for key in ("x", "width"))
    longest_ms = gpipe_ms(LAYERS)
    assert x == pytest.approx(50 + 1000 * 6 / longest_ms, abs=0.01)
    assert width == pytest.approx(1000 * 4 / longest_ms, abs=0.01)
    assert all(float(r["x"] or "") + float(r["width"] or "") <= 1050.02 for r in rects)
    assert any("frozen" in title for title in titles) == ("freezing pays" in said)
    assert {"schedule", "split", "r_max", "bubble"} <= set(page.texts["th"])
    n_cases = sum(tag == "tr" for tag, _ in page.tags) - 1
    assert n_cases == 4
    assert any("40% are taken" in text for text in page.texts["li"])


def test_the_page_is_of_bounds_files_too_and_what_they_say_is_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "<b>&"
    folder.mkdir()
    bounds = folder / "bounds.json"
    bounds.write_text(PROFILE.read_text())
    page, text = page_of([str(bounds), "--schedules", "1F1B", "--r-max", "0.8"], tmp_path)
    assert "<b>" not in text
    assert any("<b>&" in line for line in page.texts["h1"])  # no order lies beside it
    assert sum(tag == "rect" for tag, _ in page.tags) == 2 * 4 * 2 * 8
    (folder / "schedule.csv").write_text(PROFILE.with_name("schedule.csv").read_text())
    page, _ = page_of([str(bounds), "--schedules", "1F1B", "--r-max", "0.8"], tmp_path)
    assert page.texts["h1"][0].startswith("your pipeline waits ")
    capsys.readouterr()
    for more in (["--frozen-layers", "3"], [str(PROFILE)]):
        with pytest.raises(SystemExit):
            main([str(bounds), *more, "--html", str(tmp_path / "no.html")])
        assert "argument --html: it" in capsys.readouterr().err
