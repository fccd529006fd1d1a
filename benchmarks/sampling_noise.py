"""Noise that sampled tokens add to the gradients of a real model, layer by layer.

    python benchmarks/sampling_noise.py MODEL ROWS --ratios 0.3,0 0.5,0 0.3,0.15

MODEL is a Hugging Face folder that transformers loads (``pip install transformers``), ROWS a file
with one JSON object a line: instruction, input, output. For each pair of ratios, of weight and of
input gradients, the table has the mean square of what a draw adds over that of the gradient of one
microbatch, the smallest and the largest among the linear layers of a block. In float32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from processes import machine
from torch import Tensor, nn
from torch.nn import functional

from timelyfreeze.files import markdown_table
from timelyfreeze.runtime.sampling import TokenSample, TokenSampler

SEQ_LEN = 256


def sequences(folder: Path, rows: Path, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``n`` packed sequences and their targets; only answers are learned."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    labels: list[int] = []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        asked = [{"role": "user", "content": f"{row['instruction']}\n{row['input']}".strip()}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        question = tokenizer.encode(prompt, add_special_tokens=False)
        answer = tokenizer.encode(row["output"], add_special_tokens=False)
        ids += question + answer
        labels += [-100] * len(question) + answer
        while len(ids) > SEQ_LEN and n > 0:
            yield torch.tensor([ids[:SEQ_LEN]]), torch.tensor([labels[1 : SEQ_LEN + 1]])
            ids, labels, n = ids[SEQ_LEN:], labels[SEQ_LEN:], n - 1
        if n == 0:
            return


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("rows", type=Path, metavar="ROWS")
    parser.add_argument("--ratios", nargs="+", default=["0.3,0", "0.5,0", "0.3,0.15", "0.4,0.4"])
    parser.add_argument("--microbatches", type=int, default=6)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    sampler = TokenSampler(model)
    n_blocks = model.config.num_hidden_layers
    blocks = [n_blocks - 1, n_blocks // 2, 0]
    weights = {
        block: [m.weight for m in model.model.layers[block].modules() if isinstance(m, nn.Linear)]
        for block in blocks
    }
    rng = np.random.default_rng(0)
    data = list(sequences(options.model, options.rows, options.microbatches))
    tensors = [w for block in blocks for w in weights[block]]

    def gradients(x: Tensor, y: Tensor, sample: TokenSample | None) -> tuple[Tensor, ...]:
        with sampler.sampling(sample):
            logits = model(x).logits.flatten(0, 1)
            loss = functional.cross_entropy(logits, y.flatten(), reduction="sum")
            return torch.autograd.grad(loss, tensors)

    exact = [gradients(x, y, None) for x, y in data]
    size = [sum(float(g[k].square().sum()) for g in exact) for k in range(len(tensors))]
    rows = []
    for text in options.ratios:
        ratio, input_ratio = map(float, text.split(","))
        added = np.zeros(len(tensors))
        for (x, y), wanted in zip(data, exact, strict=True):
            sample = TokenSample(ratio, input_ratio, rng.random((sampler.n_layers, 2)))
            found = gradients(x, y, sample)
            added += [float((f - w).square().sum()) for f, w in zip(found, wanted, strict=True)]
        noise = np.split(added / size, len(blocks))
        rows.append([text, *(f"{part.min():.3g} to {part.max():.3g}" for part in noise)])
    print(f"{machine()}, {options.microbatches} microbatches of {SEQ_LEN} tokens\n")
    print(markdown_table(["ratios", *(f"layer {block}" for block in blocks)], rows))


if __name__ == "__main__":
    main()
