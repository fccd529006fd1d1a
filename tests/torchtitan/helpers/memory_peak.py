"""Prints the peak resident set of a forward and backward of the 8M model, in bytes.

Usage: python tests/torchtitan/helpers/memory_peak.py N_ROWS SEQ_LEN
"""

import sys

import torch
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.models.llama3 import Transformer

from torchtitan.hf.flavors import EXTRA_FLAVORS
from torchtitan.upstream.cpu_device import CpuDevice

n_rows, seq_len = map(int, sys.argv[1:])
args = EXTRA_FLAVORS["llama3"]["8M"]
args.max_seq_len = seq_len
model = Transformer(args)
tokens = torch.zeros(n_rows, seq_len, dtype=torch.int64)
for _ in range(2):  # the first run brings in code and gradients
    CpuDevice.reset_peak_memory_stats()
    cross_entropy_loss(model(tokens), tokens).backward()
print(CpuDevice.memory_stats()["active_bytes.all.peak"])
