"""The settings of the paper's language models, its Table 3, beside those of our configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timelyfreeze.compare.paper.studies import Study
from timelyfreeze.compare.runs import flatten
from timelyfreeze.files import markdown_table

MODELS = ("Llama-3.2-1B", "Llama-3-8B", "Llama-2-13B")
# Title, key of the configuration, and the paper's values by model.
ROWS: tuple[tuple[str, str, tuple[Any, Any, Any]], ...] = (
    ("dataset", "training.dataset", ("Alpaca-GPT4", "OpenHermes-2.5", "OpenHermes-2.5")),
    ("steps", "training.steps", (800, 2000, 2000)),
    ("warm-up steps", "lr_scheduler.warmup_steps", (100, 200, 200)),
    ("optimizer", "optimizer.name", ("AdamW",) * 3),
    ("learning rate", "optimizer.lr", (5e-6, 3e-6, 3e-6)),
    ("decay", "lr_scheduler.decay_type", ("cosine",) * 3),
    ("global batch", "training.global_batch_size", (128, 64, 64)),
    ("local batch", "training.local_batch_size", (16,) * 3),
    ("sequence length", "training.seq_len", (1024,) * 3),
    ("pipeline degree", "parallelism.pipeline_parallel_degree", (4,) * 3),
    # Eight microbatches.
    ("rows of a microbatch", "parallelism.pipeline_parallel_microbatch_size", (2,) * 3),
    ("T_w", "freezing.last_warmup_step", (60, 160, 150)),
    ("T_m", "freezing.last_monitor_step", (100, 200, 200)),
    ("T_f", "freezing.last_ramp_step", (200, 250, 250)),
    ("r_max", "freezing.max_freeze_ratio", (0.8,) * 3),
    ("T_APF", "freezing.apf.threshold", (0.01, 0.0001, 0.0001)),
    ("P_Auto", "freezing.autofreeze.percentile", (80.0,) * 3),
)

# What the names of our loaders stand for.
_DATASETS = {"alpaca": "Alpaca-GPT4", "sharegpt": "OpenHermes-2.5"}
_SEEDS = ((42, 22, 11), (42, 22, 11), (42,))


def settings_beside(studies: Sequence[Study]) -> str:
    """Return Table 3: of each model what its configuration file says, and what the paper says."""
    files = [flatten(study.settings()) for study in studies]
    heads = [head for study in studies for head in (f"{study.model}: ours", "paper")]
    rows = []
    for title, key, papers in ROWS:
        cells = []
        for study, settings in zip(studies, files, strict=True):
            own = settings.get(key, "-")
            cells += [str(_DATASETS.get(own, own)), str(papers[MODELS.index(study.model)])]
        rows.append([title, key, *cells])
    seeds = [(study.seeds, _SEEDS[MODELS.index(study.model)]) for study in studies]
    rows.append(["seeds", "", *(", ".join(map(str, one)) for pair in seeds for one in pair)])
    return markdown_table(["", "key", *heads], rows)
