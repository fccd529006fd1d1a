"""TRL's SFTTrainer for useful_tokens.py, in a Python of its own that has trl, peft and torch.

    python benchmarks/useful_trl.py SMOLLM2 ROWS SEQ_LEN SEQUENCES RANK

RANK 0 trains all weights. TRL reads, tokenizes and packs the rows; answers alone are learned.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
from turns import turns


def example(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    """Return an Alpaca row as TRL's prompt and completion."""
    asked = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
    said = {"role": "assistant", "content": row["output"]}
    return {"prompt": [{"role": "user", "content": asked}], "completion": [said]}


def main(model: str, rows: str, *numbers: str) -> None:
    """Train until nobody gives the word any more."""
    seq_len, sequences, rank = map(int, numbers)
    torch.set_num_threads(1)
    config = SFTConfig(
        output_dir="/nonexistent", save_strategy="no", report_to="none", logging_steps=10**6,
        packing=True, max_length=seq_len, completion_only_loss=True, gradient_checkpointing=False,
        per_device_train_batch_size=1, gradient_accumulation_steps=sequences, max_steps=10**6,
        use_cpu=True, bf16=False, learning_rate=1e-4,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )  # fmt: skip
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None
    data = Dataset.from_list(
        [example(json.loads(row)) for row in Path(rows).read_text().splitlines()]
    )
    trainer = SFTTrainer(model, args=config, train_dataset=data, peft_config=lora)
    packed = trainer.train_dataset["labels"]
    steps = turns(1, sum(i != -100 for labels in packed for i in labels) / len(packed))
    at_the_end = {"on_step_end": lambda *_, **__: next(steps)}
    trainer.add_callback(type("InTurns", (TrainerCallback,), at_the_end))
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
