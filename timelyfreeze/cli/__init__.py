"""The command ``timelyfreeze``: what it can do, and how a run is started."""

from timelyfreeze.cli.train import run_environment, train_command
