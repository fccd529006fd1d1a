"""Training with freezing: TorchTitan's trainer with warm-up, monitor and freeze phases."""
