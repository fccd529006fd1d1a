"""A whole pipeline in one process of TorchTitan."""
