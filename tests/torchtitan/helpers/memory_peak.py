"""Prints the peaks of the resident set in forwards and backwards of the 8M model, in bytes.

Usage: python tests/torchtitan/helpers/memory_peak.py SEQ_LEN N_ROWS...

Numbers of rows go up, so that no allocator has grown for more than it is asked for.
"""

import sys

import torch
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.models.llama3 import Transformer

from torchtitan.hf.flavors import EXTRA_FLAVORS
from torchtitan.upstream.cpu_device import CpuDevice

seq_len, *sizes = map(int, sys.argv[1:])
args = EXTRA_FLAVORS["llama3"]["8M"]
args.max_seq_len = seq_len
model = Transformer(args)
peaks = []
for n_rows in (1, *sizes):  # the first run brings in code and gradients
    tokens = torch.zeros(n_rows, seq_len, dtype=torch.int64)
    CpuDevice.reset_peak_memory_stats()
    cross_entropy_loss(model(tokens), tokens).backward()
    peaks.append(CpuDevice.memory_stats()["active_bytes.all.peak"])
print(*peaks[1:])
