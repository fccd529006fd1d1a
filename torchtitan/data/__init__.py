"""Instruction data: from examples to token sequences, resumable loaders, validation."""
