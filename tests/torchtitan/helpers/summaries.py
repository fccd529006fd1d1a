"""A run summary made by hand."""

from typing import Any

from timelyfreeze.records.summary import RunSummary


def make_summary(**changes: Any) -> RunSummary:
    """A run of 100 steps on two devices of which nothing was measured, then ``changes``."""
    known: dict[str, Any] = {
        "method": "timelyfreeze",
        "schedule": "1F1B",
        "seed": 42,
        "data_seed": 7,
        "config_file": "train_configs/tiny_8m.toml",
        "model": "llama3 8M",
        "dataset": "alpaca: ./rows",
        "n_devices": 4,
        "ranks_per_replica": 2,
        "device": "Abacus 3000, 2 cores",
        "torch_version": "2.13.0",
        "steps": 100,
        "started_at": "2026-11-21T13:58:21+00:00",
    }
    return RunSummary(**{**known, **changes})
