"""A pipeline whose ranks take turns on one device."""

from timelyfreeze.emulation.controller import (
    EmulatedBatch,
    EmulatedController,
    EmulatedRecorder,
    merge_ranks,
)
