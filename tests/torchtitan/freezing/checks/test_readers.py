"""Data that gives a run no batches is told before processes meet."""

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torchtitan.protocols import train_spec as titan_spec

from torchtitan.freezing.checks import ConfigError, check_data, configuration
from torchtitan.freezing.checks.checkpoints import Start
from torchtitan.freezing.launch import check, prepare

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
    spec = titan_spec.get_train_spec("llama3")
    tokenizer = spec.build_tokenizer_fn(config)
    loader = spec.build_dataloader_fn(
        dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=config
    )
    next(iter(loader))
    folder = tmp_path / "step-1"
    dcp.save({"dataloader": loader.state_dict()}, checkpoint_id=folder, no_dist=True)
    monkeypatch.setattr(configuration, "start_of", lambda config: Start(folder, 1))

    check_data(config)
    rows(tmp_path / "rows.jsonl", 17)
    with pytest.raises(ConfigError, match="has examples = 16, this run has 17; give the run the d"):
        check_data(config)
    config.checkpoint.exclude_from_loading = ["dataloader"]
    check_data(config)
