"""What each process says of a command line that cannot be used; nothing starts here."""

import logging
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.freezing import launch as launch_module
from torchtitan.freezing.checks import ConfigError
from torchtitan.freezing.checks.checkpoints import Start
from torchtitan.freezing.launch import check, launch, prepare
from torchtitan.images.examples import ImageError

# Wrong for the parser, which prints by itself; wrong for our checks, which raise.
MISTAKES = ["--unknown.key=1", "--training.steps=x", "--model.vocab_size=0"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(launch_module.time, "sleep", waited.append)
    monkeypatch.setattr(launch_module, "end_with_parent", lambda *_: None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return waited


def said(capfd: pytest.CaptureFixture[str]) -> str:
    printed = capfd.readouterr()
    return printed.out + printed.err


@pytest.mark.slow
@pytest.mark.parametrize("error", MISTAKES)
def test_an_error_is_told_by_the_first_process_alone(
    capfd: pytest.CaptureFixture[str], waits: list[float], error: str
) -> None:
    assert launch([error], local_rank=0) == 2
    assert error.lstrip("-").split("=")[0] in said(capfd)
    assert launch([error], local_rank=1) == 2
    assert said(capfd) == ""
    assert waits == [], "without torchrun nobody would end it"


@pytest.mark.slow
@pytest.mark.parametrize("error", MISTAKES)
def test_under_torchrun_others_wait_for_the_first_and_tell_what_it_did_not(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    waits: list[float],
    error: str,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")

    def ended(seconds: float) -> None:
        raise InterruptedError

    monkeypatch.setattr(launch_module.time, "sleep", ended)
    with pytest.raises(InterruptedError):
        launch([error], local_rank=1)
    assert said(capfd) == "", "torchrun ends it before it says anything"
    monkeypatch.setattr(launch_module.time, "sleep", waits.append)
    assert launch([error], local_rank=1) == 2
    assert error.lstrip("-").split("=")[0] in said(capfd)
    assert launch([error], local_rank=0) == 2
    assert len(waits) == 1, "the first does not wait"


def test_help_is_printed_once_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], waits: list[float]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert launch(["--help"], local_rank=0) == 0
    assert "--freezing.method" in said(capfd)
    assert launch(["--help"], local_rank=3) == 0
    assert said(capfd) == ""
    assert waits == []


def test_a_damaged_picture_is_named_without_a_stack_trace(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], waits: list[float]
) -> None:
    """Found by reading, after the checks; the launch itself is that of any run."""
    import torchtitan.train as titan_train

    def broken(trainer: object) -> None:
        raise ImageError("pictures.parquet, row 7: is not a readable picture (cut off)")

    monkeypatch.setattr(launch_module, "prepare", lambda args: make_job_config())
    monkeypatch.setattr(launch_module, "trainer_for", lambda job_config: None)
    monkeypatch.setattr(titan_train, "ConfigManager", None)
    monkeypatch.setattr(titan_train, "main", broken)
    # In a whole suite the logger may have the stream of a test that has ended.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    assert launch([], local_rank=0) == 2
    printed = said(capfd)
    assert "error: pictures.parquet, row 7: is not a readable picture (cut off)\n" in printed
    assert "Traceback" not in printed


TINY = ("--job.config_file=train_configs/tiny_8m.toml", "--training.seq_len=64")
ROW = '{"instruction": "Say yes.", "input": "", "output": "Yes, I do."}\n'


def rows(place: Path, number: int) -> str:
    place.write_text(ROW * number)
    return f"--training.dataset_path={place}"


def validation(batch: int) -> list[str]:
    size = f"--validation.local_batch_size={batch}"
    return ["--validation.enable", "--validation.dataset=alpaca", "--validation.seq_len=64", size]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "n_rows", "told"),
    [
        (["--training.seq_len=8"], 9, "none of 9 examples has an answer token within training.seq"),
        (validation(batch=8), 7, "validation.local_batch_size is 8, but a reader has only 7 exam"),
        (
            [*validation(batch=8), "--parallelism.data_parallel_shard_degree=2"],
            14,
            "validation.local_batch_size is 8, but a reader has only 7 examples",
        ),
        (
            ["--parallelism.data_parallel_shard_degree=2"],
            1,
            "the data set has 1 usable examples, fewer than the 2 readers",
        ),
    ],
)
def test_data_that_gives_no_batch_is_told_before_processes_meet(
    tmp_path: Path, keys: list[str], n_rows: int, told: str
) -> None:
    alone = [*TINY, "--parallelism.data_parallel_shard_degree=1", f"--job.dump_folder={tmp_path}"]
    with pytest.raises(ConfigError, match=told):
        check([*alone, *keys, rows(tmp_path / "rows.jsonl", n_rows)])
    check(
        [*alone, *(key for key in keys if "seq_len=8" not in key), rows(tmp_path / "r.jsonl", 16)]
    )


@pytest.mark.slow
def test_rows_added_since_the_checkpoint_are_told_before_processes_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of another number are dealt in another order: what was read is not known any more."""
    config = prepare([*TINY, rows(tmp_path / "rows.jsonl", 16)])
    titan_spec = launch_module.titan_spec.get_train_spec("llama3")
    tokenizer = titan_spec.build_tokenizer_fn(config)
    loader = titan_spec.build_dataloader_fn(
        dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=config
    )
    next(iter(loader))
    folder = tmp_path / "step-1"
    dcp.save({"dataloader": loader.state_dict()}, checkpoint_id=folder, no_dist=True)
    monkeypatch.setattr(launch_module, "start_of", lambda config: Start(folder, 1))

    launch_module.check_readers(config)
    rows(tmp_path / "rows.jsonl", 17)
    with pytest.raises(ConfigError, match="has examples = 16, this run has 17; give the run the d"):
        launch_module.check_readers(config)
    config.checkpoint.exclude_from_loading = ["dataloader"]
    launch_module.check_readers(config)
