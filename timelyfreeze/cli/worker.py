"""Entry point of a run's processes under torchrun."""

import runpy

from timelyfreeze.cli import overlay

if __name__ == "__main__":
    overlay.install()  # also where the project is not installed
    runpy.run_module("torchtitan.freezing", run_name="__main__", alter_sys=True)
