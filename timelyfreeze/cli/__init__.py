"""The command ``timelyfreeze``: what it can do, and how a run is started."""

from timelyfreeze.cli.environment import run_environment
from timelyfreeze.cli.train import train_command

__all__ = ["run_environment", "train_command"]
