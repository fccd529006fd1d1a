"""A whole pipeline in a single process of TorchTitan."""
