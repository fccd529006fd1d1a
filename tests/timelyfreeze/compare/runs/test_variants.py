"""Values of a key that runs are made for: which runs, where, and what the table makes of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.timelyfreeze.compare.run_folders import keys_of, table_notes, table_rows, write_run
from tests.timelyfreeze.compare.tables import GAIN
from timelyfreeze.compare.command import main
from timelyfreeze.compare.runs.jobs import Settings
from timelyfreeze.compare.runs.sweep import plan_jobs
from timelyfreeze.compare.runs.variants import parse_variants, run_folder, variants
from timelyfreeze.records.tables import STEPS

CAP, BATCH = "freezing.max_freeze_ratio", "training.local_batch_size"
RATE, STEPS_KEY = "optimizer.lr", "training.steps"


class Trainer:
    """Stands in for torchrun: 10 steps of 1 s for 16 examples; a cap r makes them 1 - r / 2."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.keys: list[dict[str, str]] = []
        self.fails: set[str] = set()

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        keys = keys_of(command)
        self.keys.append(keys)
        self.folders.append(Path(keys["job.dump_folder"]))
        if any(name in keys["job.dump_folder"] for name in self.fails):
            return 3
        freezes = keys["freezing.method"] != "none"
        cap = float(keys.get(CAP, 0.8 if freezes else 0.0))
        n, size = int(keys.get(STEPS_KEY, 10)), int(keys.get(BATCH, 16))
        step_s = (1 - cap / 2) * size / 16 / (1 + 10 * float(keys.get(RATE, 0.0)))
        settings = {
            "training": {"steps": n, "local_batch_size": size},
            "freezing": {"max_freeze_ratio": cap if freezes else "auto"},
            "optimizer": {"lr": float(keys.get(RATE, 0.1))},
        }
        folder = write_run(
            Path(keys["job.dump_folder"], "tb", "x"), keys["freezing.method"],
            seed=int(keys["debug.seed"]), steps=n, steps_done=n, seconds=n * step_s,
            tokens_per_second=100 * size / step_s, settings=settings, losses=[(1.0, 2.0)] * 3,
        )  # fmt: skip
        rows = [f"{i},,{i * step_s},1,1,,,,,,," for i in range(1, n + 1)]
        (folder / "steps.csv").write_text("\n".join([",".join(STEPS.header), *rows]) + "\n")
        return 0


def run(trainer: Trainer, folder: Path, methods: str, *more: str, seeds: str = "42") -> int:
    (folder / "small.toml").write_text("[training]\nsteps = 10\n")
    arguments = ["run", str(folder / "small.toml"), str(folder / "out"), "--schedules", "1F1B"]
    arguments += ["--nproc", "2", "--methods", *methods.split(), "--seeds", *seeds.split()]
    return main([*arguments, *more], starter=trainer)


def folders(trainer: Trainer, folder: Path) -> list[str]:
    return [path.relative_to(folder / "out/1F1B").as_posix() for path in trainer.folders]


# --- the runs -------------------------------------------------------------------------------------


def test_a_key_of_the_freezing_varies_runs_that_freeze(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    vary = ["--vary", f"{CAP}=0.2,0.80"]
    assert run(trainer, tmp_path, "none timelyfreeze", *vary) == 0
    assert folders(trainer, tmp_path) == [
        "none/seed_42", "timelyfreeze/max_freeze_ratio=0.2/seed_42",
        "timelyfreeze/max_freeze_ratio=0.80/seed_42",
    ]  # fmt: skip
    assert [keys.get(CAP) for keys in trainer.keys] == [None, "0.2", "0.80"]
    record = json.loads((trainer.folders[1] / "comparison_run.json").read_text())
    assert record["variant"] == {CAP: "0.2"}
    printed = capsys.readouterr().out
    assert "[2/3] 1F1B timelyfreeze max_freeze_ratio 0.2 seed 42: ..." in printed
    # 1 s against 0.9 and 0.6 s.
    assert [(row["settings"], row[GAIN]) for row in table_rows(printed)] == [
        ("-", "+0.0"), ("max_freeze_ratio 0.2", "+11.1"), ("max_freeze_ratio 0.8", "+66.7"),
    ]  # fmt: skip
    assert run(trainer, tmp_path, "none timelyfreeze", *vary) == 0
    assert len(trainer.keys) == 3


def test_of_several_keys_each_pair_runs_beside_the_none_of_its_work(tmp_path: Path) -> None:
    trainer = Trainer()
    vary = ["--vary", f"{CAP}=0.2,0.8", "--vary", f"{BATCH}=8,16"]
    assert run(trainer, tmp_path, "none timelyfreeze", *vary) == 0
    found = folders(trainer, tmp_path)
    assert found[0] == "none/local_batch_size=8/seed_42"
    assert found[1:3] == [
        f"timelyfreeze/max_freeze_ratio={cap}/local_batch_size=8/seed_42" for cap in (0.2, 0.8)
    ]
    assert [keys[BATCH] for keys in trainer.keys] == 3 * ["8"] + 3 * ["16"]
    assert [keys.get(CAP) for keys in trainer.keys] == 2 * [None, "0.2", "0.8"]


@pytest.mark.parametrize(
    ("methods", "caps"),
    [
        ("none timelyfreeze apf", [None, None, "0.1", "0.2"]),
        ("timelyfreeze+apf autofreeze", ["0.1", "0.2", None]),
    ],
)
def test_an_option_of_a_method_varies_that_method(methods: str, caps: list[str | None]) -> None:
    asked = parse_variants(["freezing.apf.threshold=0.1,0.2"])
    jobs = plan_jobs(methods.split(), ["1F1B"], [42], 2, variants=asked)
    assert [job.keys.get("freezing.apf.threshold") for job in jobs] == caps


def test_keys_of_adapters_vary_their_runs_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    vary = ["--vary", "lora.rank=4,8", "--vary", f"{CAP}=0.2,0.8"]
    assert run(trainer, tmp_path, "none timelyfreeze lora", *vary) == 0
    found = [
        (keys["freezing.method"], keys.get("lora.rank"), keys.get(CAP)) for keys in trainer.keys
    ]
    assert sorted(found, key=str) == [
        ("lora", "4", None), ("lora", "8", None), ("none", None, None),
        ("timelyfreeze", None, "0.2"), ("timelyfreeze", None, "0.8"),
    ]  # fmt: skip
    rows = table_rows(capsys.readouterr().out)
    assert [row[GAIN] for row in rows if row["method"] == "lora"] == ["+66.7", "+66.7"]


def test_adapters_first_are_for_methods_that_freeze_and_have_their_keys() -> None:
    asked = parse_variants(["lora.until=0,48", "lora.rank=8,32"])
    jobs = plan_jobs(["none", "timelyfreeze", "lora"], ["1F1B"], [42], 2, variants=asked)
    keys = [
        (job.keys["freezing.method"], str(job.keys["lora.until"]), job.keys.get("lora.rank"))
        for job in jobs
    ]
    assert sorted(keys, key=str) == [
        ("lora", "0", "32"), ("lora", "0", "8"), ("none", "0", None),
        ("timelyfreeze", "0", None), ("timelyfreeze", "48", "32"), ("timelyfreeze", "48", "8"),
    ]  # fmt: skip
    first = {"lora.until": 48, "freezing.max_freeze_ratio": 0.8}
    later = {**first, "lora.until": 36}
    told = variants("lora+timelyfreeze", [(first, {}), (later, {})])
    assert told == ["lora.until 48", "lora.until 36"]


def test_a_section_of_all_methods_varies_every_one_that_freezes() -> None:
    asked = parse_variants(["freezing.cache.enable=false,true"])
    jobs = plan_jobs(["none", "autofreeze"], ["1F1B"], [42], 2, variants=asked)
    assert [job.keys.get("freezing.cache.enable") for job in jobs] == [None, False, True]


def test_any_value_gives_a_folder_of_its_own() -> None:
    values = ["a/b", "a%2Fb", "..", "a b", "-1", "x=y"]
    paths = [run_folder("GPipe", "apf", 1, {"training.dataset": value}) for value in values]
    assert len(set(paths)) == len(values)
    for path in paths:
        *_, name, _ = path.parts
        assert name.startswith("dataset=")
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789=%.-_BDF")


def test_a_truth_is_a_flag() -> None:
    asked = parse_variants(["compile.enable=true,false"])
    jobs = plan_jobs(["none"], ["1F1B"], [42], 2, variants=asked)
    words = [job.command(Settings(Path("small.toml")), Path("out")) for job in jobs]
    assert ["--compile.enable" in some for some in words] == [True, False]
    assert ["--compile.no_enable" in some for some in words] == [False, True]


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        (["max_freeze_ratio=0.2"], "--vary is 'max_freeze_ratio=0.2'; it must be a key and its"),
        ([CAP], f"--vary is '{CAP}'"),
        ([f"{CAP}=0.2,,0.4"], f"--vary is '{CAP}=0.2,,0.4'"),
        ([f"{CAP}=0.2,0.20"], f"--vary has {CAP}=0.2,0.20; name each value once"),
        ([f"{CAP}=0.2", f"{CAP}=0.4"], f"--vary has {CAP} twice; give all its values at once"),
        (["freezing.method=apf"], "--vary has freezing.method; use --methods instead"),
        (
            ["parallelism.pipeline_parallel_schedule=GPipe"],
            "--vary has parallelism.pipeline_parallel_schedule; use --schedules instead",
        ),
        (["data.seed=1,2"], "--vary has data.seed; use --seeds instead"),
        (["job.dump_folder=x"], "--vary has job.dump_folder; use OUTPUT instead"),
        (
            ["freezing.apf.threshold=1,2"],
            "--vary has freezing.apf.threshold, which concerns none of --methods none timelyfreeze",
        ),
    ],
)
def test_what_cannot_be_varied(
    tmp_path: Path, vary: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    words = [word for text in vary for word in ("--vary", text)]
    assert run(trainer, tmp_path, "none timelyfreeze", *words) == 2
    assert message in capsys.readouterr().err
    assert trainer.keys == []


def test_what_is_varied_is_no_argument_of_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    more = ["--vary", f"{CAP}=0.2,0.4", "--", "--freezing.max-freeze-ratio=0.3"]
    assert run(trainer, tmp_path, "timelyfreeze", *more) == 2
    assert f"--{CAP} is among the trainer's arguments" in capsys.readouterr().err


# --- peers and longer runs ------------------------------------------------------------------------


def test_each_variant_has_peers_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    vary = ["--vary", f"{CAP}=0.2,0.8"]
    assert run(trainer, tmp_path, "none timelyfreeze fewer_steps", *vary, seeds="1 2") == 0
    assert folders(trainer, tmp_path)[3:5] == [
        "fewer_steps_for_timelyfreeze/max_freeze_ratio=0.2/seed_1",
        "fewer_steps_for_timelyfreeze/max_freeze_ratio=0.8/seed_1",
    ]
    # As many steps of 1 s as fit into 9 and 6 s; what they freeze is not told to them.
    peers = trainer.keys[3:5]
    assert [(keys["training.steps"], keys.get(CAP)) for keys in peers] == [("9", None), ("6", None)]
    rows = table_rows(capsys.readouterr().out)
    assert [(row["method"], row["settings"], row["runs"], row["seconds"]) for row in rows] == [
        ("none", "-", "2", "10.0"),
        ("timelyfreeze", "max_freeze_ratio 0.2", "2", "9.0"),
        ("timelyfreeze", "max_freeze_ratio 0.8", "2", "6.0"),
        ("fewer_steps_for_timelyfreeze", "max_freeze_ratio 0.2", "2", "9.0"),
        ("fewer_steps_for_timelyfreeze", "max_freeze_ratio 0.8", "2", "6.0"),
    ]


def test_peers_made_before_a_key_was_varied_are_not_averaged_with_later_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    methods = "none timelyfreeze fewer_steps"
    run(trainer, tmp_path, methods)
    run(trainer, tmp_path, methods, "--vary", f"{CAP}=0.2")
    capsys.readouterr()
    assert main(["show", "--table", str(tmp_path / "out")]) == 0
    rows = table_rows(capsys.readouterr().out)
    assert [(row["settings"], row["runs"], row["seconds"]) for row in rows[-2:]] == [
        ("-", "1", "6.0"), ("max_freeze_ratio 0.2", "1", "9.0"),
    ]  # fmt: skip


def test_runs_and_peers_are_fitted_to_the_none_of_their_work(tmp_path: Path) -> None:
    trainer = Trainer()
    more = ["--vary", f"{STEPS_KEY}=10,20", "--steps-factor", "1.5"]
    assert run(trainer, tmp_path, "timelyfreeze none fewer_steps", *more) == 0
    # Steps take 0.6 s with freezing: 15 and 30 of them take as long as 9 and 18 without.
    steps = [keys[STEPS_KEY] for keys in trainer.keys]
    assert steps == ["10", "15", "9", "20", "30", "18"]


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vary", "gains"),
    [
        (f"{BATCH}=8,16", ["+0.0", "+0.0", "+66.7", "+66.7"]),
        # Not of the work in a step, yet other runs.
        (f"{STEPS_KEY}=10,20", ["+0.0", "+0.0", "+66.7", "+66.7"]),
        (f"{RATE}=0.1,0.9", ["+0.0", "+0.0", "+66.7", "+66.7"]),
    ],
)
def test_a_variant_is_held_against_the_none_of_its_work(
    tmp_path: Path, vary: str, gains: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Trainer(), tmp_path, "none timelyfreeze", "--vary", vary) == 0
    assert [row[GAIN] for row in table_rows(capsys.readouterr().out)] == gains


def test_a_peer_is_held_against_the_none_of_its_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--vary", f"{RATE}=0.1,0.9"]
    assert run(Trainer(), tmp_path, "none timelyfreeze fewer_steps", *more) == 0
    rows = table_rows(capsys.readouterr().out)
    assert [(row["settings"], row[GAIN]) for row in rows[-2:]] == [
        ("optimizer.lr 0.1", "+0.0"), ("optimizer.lr 0.9", "+0.0"),
    ]  # fmt: skip


def test_a_key_that_a_table_does_not_look_at_otherwise_sets_runs_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Trainer(), tmp_path, "none", "--vary", "validation.freq=5,10") == 0
    rows = table_rows(capsys.readouterr().out)
    assert [(row["settings"], row["runs"]) for row in rows] == [
        ("validation.freq 5", "1"), ("validation.freq 10", "1"),
    ]  # fmt: skip


def test_a_variant_that_failed_has_a_row_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    trainer.fails = {"max_freeze_ratio=0.8"}
    assert run(trainer, tmp_path, "none timelyfreeze", "--vary", f"{CAP}=0.2,0.8") == 1
    printed = capsys.readouterr().out
    assert [(row["settings"], row["runs"]) for row in table_rows(printed)] == [
        ("-", "1"), ("max_freeze_ratio 0.2", "1"), ("max_freeze_ratio 0.8", "1 failed"),
    ]  # fmt: skip
    (note,) = [note for note in table_notes(printed) if note.startswith("failed")]
    assert note.startswith("failed: 1F1B timelyfreeze max_freeze_ratio 0.8 seed 42, in ")
