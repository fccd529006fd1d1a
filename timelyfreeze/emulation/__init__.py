"""A pipeline whose ranks take turns on one device."""

from timelyfreeze.emulation.controller import EmulatedController
from timelyfreeze.emulation.recorder import EmulatedBatch, EmulatedRecorder
from timelyfreeze.emulation.turns import merge_ranks

__all__ = ["EmulatedBatch", "EmulatedController", "EmulatedRecorder", "merge_ranks"]
