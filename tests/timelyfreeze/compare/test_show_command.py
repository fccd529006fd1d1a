"""The command that shows what many runs say: files, page, exit status."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from tests.timelyfreeze.compare.run_folders import table_rows, write_record, write_run, write_scores
from tests.timelyfreeze.plots.folders import write_measured
from timelyfreeze.compare import command
from timelyfreeze.settings.phases import Phase

pytestmark = pytest.mark.slow


def main(arguments: list[str]) -> int:
    return command.main(["show", *arguments])


EVIL = '<script>alert("1")</script> & "quoted" | $x$'


class Page(HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two methods with two seeds each, one of them scored."""
    folder = tmp_path / "runs"
    for seed in (1, 2):
        losses = [(10.0 * i, 4.0 - i / 10 + seed / 100) for i in range(1, 9)]
        for method, speed in (("none", 100.0), ("timelyfreeze", 140.0)):
            path = write_run(
                folder / method / str(seed), method, seed=seed, tokens_per_second=speed + seed,
                validation_loss=3.2, losses=losses,
                stage_ratios={"0": 0.5} if method == "timelyfreeze" else None,
            )  # fmt: skip
            write_scores(path, 0.4)
    return folder


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Runs that make a single plot."""
    folder = tmp_path / "few"
    for seed, loss in ((1, 3.2), (2, 3.3)):
        for method in ("none", "timelyfreeze"):
            write_run(folder / method / str(seed), method, seed=seed, losses=[(80.0, loss)] * 5)
    return folder


def test_everything_is_in_the_folder_and_the_page_needs_nothing_else(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    assert main([str(runs), "--output", str(out), "--title", "Two & two"]) == 0
    kinds = ["accuracy_throughput", "freeze_ratio_stages", "held_out_loss_seconds"]
    kinds += ["loss_seconds", "loss_throughput"]
    names = [f"{kind}.{ending}" for kind in kinds for ending in ("png", "svg")]
    names += [f"comparison.{ending}" for ending in ("csv", "html", "md")]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert all(path.stat().st_size < 200_000 for path in out.glob("*.png"))

    rows = table_rows(capsys.readouterr().out)
    # +40% but for the seeds: 141/101 and 142/102.
    assert [row["gain over none, %"] for row in rows] == ["+0.0", "+39.4 (39.2..39.6)"]
    text = (out / "comparison.html").read_text()
    page = Page(text)
    assert page.open == []
    assert "Two & two" in page.text
    assert "+39.4 (39.2..39.6)" in page.text
    assert "Not shown: no run has freeze ratios by step (steps.csv)." in page.text
    assert [name for name, _ in page.tags if name in ("script", "link", "iframe", "object")] == []
    assert not re.search(r"https?:", text)
    images = page.all("img")
    assert len(images) == 5
    for image in images:
        source, alt = image["src"], image["alt"]
        assert source is not None
        assert alt is not None
        assert "timelyfreeze" in alt
        kind, data = source.split(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as plot:
            assert plot.width >= 1000
    headings = [name for name, _ in page.tags if name in ("h1", "h2", "h3")]
    assert headings == ["h1", *["h2"] * 9]


def test_names_from_files_are_texts_and_nothing_else(few: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        losses = [(float(i), 3.0) for i in range(8)]
        write_run(few / f"evil{seed}", EVIL, seed=seed, model=EVIL, dataset=EVIL, device=EVIL,
                  schedule=EVIL, failure=EVIL, tokens_per_second=1.0, losses=losses)  # fmt: skip
    out = tmp_path / "out"
    assert main([str(few), "--output", str(out), "--title", EVIL]) == 0
    page = Page((out / "comparison.html").read_text())
    assert page.open == []
    assert page.all("script") == []
    assert {key for _, attributes in page.tags for key in attributes} <= {
        "alt", "charset", "class", "content", "http-equiv", "id", "lang", "name", "scope", "src",
    }  # fmt: skip
    assert page.text.count(EVIL) >= 4
    assert EVIL in " ".join(image["alt"] or "" for image in page.all("img"))
    lines = (out / "comparison.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_names_of_folders_draw_and_calculate_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No markup in Markdown, no formula in a spreadsheet, no code for a terminal."""
    formula, markup = '=HYPERLINK("x")', "<b>`*x*` [a](http://b)"
    runs = tmp_path / "\x1b[31mred\x1b]0;title\x07"
    write_run(runs / "1", formula, schedule=markup, failure=markup, tokens_per_second=1.0)
    write_run(runs / "2", "apf", schedule="@SUM(1)", tokens_per_second=-1.0)
    (runs / "2/losses.csv").write_text("no table\n")
    out = tmp_path / "out"
    main([str(runs), "--output", str(out), "--table"])
    said, markdown = capsys.readouterr(), (out / "comparison.md").read_text()
    for text in (markdown, said.out, said.err):
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "\\x1b[31mred" in said.err
    assert r"\<b>\`\*x\*\` [a]\(http://b)" in markdown
    assert not re.search(r"(?<!\\)(<b|`\*|\]\()", markdown)
    table = (out / "comparison.csv").read_text()
    assert "'=HYPERLINK" in table
    assert not re.search(r'(^|,)"?[=@]', table, re.M)


def test_places_are_marked_and_no_gain_crosses_them(tmp_path: Path) -> None:
    for device, method, speed in [("some CPU", "none", 100.0), ("some GPU", "apf", 9000.0)]:
        write_run(tmp_path / "runs" / method, method, device=device, tokens_per_second=speed,
                  validation_loss=3.0)  # fmt: skip
    out = tmp_path / "out"
    assert main([str(tmp_path / "runs"), "--output", str(out)]) == 0
    page = Page((out / "comparison.html").read_text())
    assert "They were made in different places" in page.text
    assert "2 x some GPU, llama3 8M" in page.text
    assert "no none run" in page.text
    assert (out / "loss_throughput_2.png").exists()


def test_what_cannot_be_read_is_named_and_the_others_are_compared(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (few / "none" / "1" / "summary.json").write_text('{"some": "thing else"}')
    (few / "timelyfreeze" / "1" / "summary.json").write_text(
        '{"method": "apf", "stage_ratios": {"first": 1}}'
    )
    write_record(few / "failed", 1, method="apf")
    out = tmp_path / "out"
    assert main([str(few), "--output", str(out)]) == 1
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert first == (f"not read: {few}/none/1: summary.json: the whole has unknown fields: some")
    assert "a key of stage_ratios is 'first'; it must be a whole number" in second
    assert [row["runs"] for row in table_rows(captured.out)] == ["1", "1 failed", "1"]
    page = Page((out / "comparison.html").read_text())
    assert f"not read: {few}/none/1" in page.text
    assert "3 runs, 2 of them finished." in page.text


def test_plots_of_another_comparison_do_not_stay_and_the_same_ones_come_again(
    few: Path, tmp_path: Path
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    out.mkdir()
    for name in ("loss_seconds_7.png", "timelines_2.png", "freeze_ratio_steps.svg", "mine.png"):
        (out / name).write_text("old")
    for folder in (out, again):
        assert main([str(few), "--output", str(folder)]) == 0
    assert (out / "mine.png").read_text() == "old"
    (out / "mine.png").unlink()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in again.iterdir()
    }


def test_each_schedule_has_its_timelines_in_page_and_files(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    for schedule in ("GPipe", "1F1B"):
        for method in ("none", "apf"):
            folder = write_run(runs / schedule / method, method, schedule=schedule)
        write_measured(folder, Phase.UPPER_BOUND, Phase.STABLE)
    assert main([str(runs), "--output", str(out)]) == 0
    names = ["timelines.png", "timelines.svg", "timelines_2.png", "timelines_2.svg"]
    assert sorted(path.name for path in out.glob("timelines*")) == names
    page = Page((out / "comparison.html").read_text())
    assert [image["alt"] for image in page.all("img")] == [
        f"Timelines of one batch. {schedule} none: measured without freezing, 15 ms; "
        f"{schedule} apf: measured with freezing, 12.5 ms."
        for schedule in ("GPipe", "1F1B")
    ]
    assert "1F1B, 2 x some CPU, 2 cores, llama3 8M" in page.text
    text = (out / "comparison.md").read_text()
    assert "## Timelines of one batch, 1F1B, 2 x some CPU, 2 cores, llama3 8M" in text
    assert "![Timelines of one batch](timelines_2.png)" in text


def test_a_reference_is_one_run(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(few), "--output", str(tmp_path / "out"), "--window", "1", "--reference"]
    assert main([*command, str(few)]) == 2
    assert f"--reference {few} holds 4 runs; name one of them" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, str(few / "none" / "1")]) == 0
    title = "seconds to the reference's loss"
    assert [row[title] for row in table_rows(capsys.readouterr().out)] == [
        # The second seed never gets to 3.2.
        "80.0, never in 1 of 2", "80.0, never in 1 of 2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUNS", "--window", "0"], "--window is 0; it must be 1 or more"),
        (["EMPTY"], "no summary.json below"),
        (["NOWHERE"], "is not a folder; name folders that hold runs"),
        (["EMPTY", "--table"], "no summary.json below"),
        (["RUNS", "--output", "FILE"], "which is no folder"),
        (["RUNS", "--", "--a=b"], "show starts no trainer"),
        (["RUNS", "--reference", "EMPTY"], "holds 0 runs; name one of them"),
    ],
)
def test_errors(
    arguments: list[str],
    message: str,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    places = {"RUNS": runs, "EMPTY": tmp_path / "empty", "NOWHERE": tmp_path / "nowhere",
              "FILE": tmp_path / "file"}  # fmt: skip
    output = ["--output", str(tmp_path / "out")]
    assert main([*output, *(str(places.get(word, word)) for word in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
