"""Values of a key that runs are made for: which runs, where, and what the table makes of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.timelyfreeze.compare.run_folders import keys_of, table_rows, write_run
from tests.timelyfreeze.compare.tables import told
from tests.tools.golden import assert_golden, assert_only
from timelyfreeze.compare.command import main
from timelyfreeze.compare.runs.jobs import Settings
from timelyfreeze.compare.runs.sweep import plan_jobs
from timelyfreeze.compare.runs.variants import parse_variants, run_folder, variants
from timelyfreeze.records.tables import STEPS

FILE = "variants.txt"
CAP, BATCH = "freezing.max_freeze_ratio", "training.local_batch_size"
RATE, STEPS_KEY = "optimizer.lr", "training.steps"


class Trainer:
    """Stands in for torchrun: 10 steps of 1 s for 16 examples; a cap r makes them 1 - r / 2."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.commands: list[Sequence[str]] = []
        self.keys: list[dict[str, str]] = []
        self.fails: set[str] = set()

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        keys = keys_of(command)
        self.commands.append(command)
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


PAIRS = ["none timelyfreeze", f"{CAP}=0.2,0.8"]
# Methods, then values of keys. Steps of 1 s take 0.9 s under a cap of 0.2, 0.6 s under one of 0.8.
SCENARIOS: dict[str, list[str]] = {
    "a key of the freezing varies runs that freeze": ["none timelyfreeze", f"{CAP}=0.2,0.80"],
    "each pair of several keys runs beside the none of its work": [*PAIRS, f"{BATCH}=8,16"],
    "an option varies its method": ["none timelyfreeze apf", "freezing.apf.threshold=0.1,0.2"],
    "and hybrids with it": ["timelyfreeze+apf autofreeze", "freezing.apf.threshold=0.1,0.2"],
    "keys of adapters vary their runs alone": [f"{PAIRS[0]} lora", "lora.rank=4,8", PAIRS[1]],
    "adapters first are for methods that freeze and have their keys": [
        "none timelyfreeze lora", "lora.until=0,48", "lora.rank=8,32",
    ],
    "a section of all methods varies each that freezes": [
        "none autofreeze", "freezing.cache.enable=false,true",
    ],
    # As many steps of 1 s as fit into 9 and 6 s; what they freeze is not told to them.
    "each variant has peers of its own": [f"{PAIRS[0]} fewer_steps", PAIRS[1], "seeds=1 2"],
    # With freezing 15 and 30 steps take as long as 9 and 18 without.
    "runs and peers are fitted to the none of their work": [
        "timelyfreeze none fewer_steps", f"{STEPS_KEY}=10,20", "steps_factor=1.5",
    ],
    "the none of as much work in a step": ["none timelyfreeze", f"{BATCH}=8,16"],
    "the none of the same key, peers too": [f"{PAIRS[0]} fewer_steps", f"{RATE}=0.1,0.9"],
    "keys that a table does not look at otherwise": ["none", "validation.freq=5,10"],
    "a variant that failed has a row of its own": [*PAIRS, "fails=max_freeze_ratio=0.8"],
}  # fmt: skip
TITLES = ("method", "settings", "runs", "gain over none, %", "seconds")
OWN = ("--rdzv", "--nproc", "--job.", "--parallelism.", "--freezing.method", "--freezing.seed",
       "--debug.seed", "--data.seed")  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_varied_is_run_and_tabled(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    methods, *rest = SCENARIOS[name]
    given = dict(word.split("=", 1) for word in rest)
    trainer, seeds = Trainer(), given.pop("seeds", "42")
    trainer.fails = {given.pop("fails")} if "fails" in given else set()
    more = [f"--steps-factor={given.pop('steps_factor')}"] if "steps_factor" in given else []
    more += [word for key, values in given.items() for word in ("--vary", f"{key}={values}")]
    assert run(trainer, tmp_path, methods, *more, seeds=seeds) == bool(trainer.fails)
    runs = [
        " ".join([
            folder.relative_to(tmp_path / "out/1F1B").as_posix(),
            *(word for word in words if word.startswith("--") and not word.startswith(OWN)),
        ])
        for folder, words in zip(trainer.folders, trainer.commands, strict=True)
    ]  # fmt: skip
    assert_golden(FILE, name, "\n".join([*runs, told(tmp_path / "out", titles=TITLES)]))
    n_runs = len(runs)
    if not trainer.fails:
        assert run(trainer, tmp_path, methods, *more, seeds=seeds) == 0
        assert len(trainer.commands) == n_runs, "what is there is not run again"


def test_every_text_that_is_expected_is_made() -> None:
    assert_only(FILE, SCENARIOS)


def test_a_variant_is_told_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer()
    assert run(trainer, tmp_path, "timelyfreeze", "--vary", f"{CAP}=0.2") == 0
    record = json.loads((trainer.folders[0] / "comparison_run.json").read_text())
    assert record["variant"] == {CAP: "0.2"}
    assert "[1/1] 1F1B timelyfreeze max_freeze_ratio 0.2 seed 42: ..." in capsys.readouterr().out


def test_adapters_that_come_first_set_runs_apart_by_when_they_end() -> None:
    first = {"lora.until": 48, "freezing.max_freeze_ratio": 0.8}
    later = {**first, "lora.until": 36}
    told = variants("lora+timelyfreeze", [(first, {}), (later, {})])
    assert told == ["lora.until 48", "lora.until 36"]


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


# --- the table ------------------------------------------------------------------------------------
