"""The command ``timelyfreeze``: its parts, and the start of a run."""

from timelyfreeze.cli.train import run_environment, train_command
