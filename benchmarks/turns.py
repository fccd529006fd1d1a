"""Steps of a trainer, at the word of useful_tokens.py; needs no package, so any Python has it."""

import os
import sys
import time
from collections.abc import Iterator

WORD = "useful-tokens "  # what lines for useful_tokens.py begin with


def turns(n_cold: int, learned: float) -> Iterator[None]:
    """Wait at the end of each step, when taken on, and say its processor seconds.

    First, after ``n_cold`` steps, it says how many tokens of a sequence are learned in the mean.
    """
    for _ in range(n_cold - 1):
        yield
    said = learned
    while True:
        print(f"\n{WORD}{said}", flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # nobody wants a checkpoint of it
        began = time.process_time()
        yield
        said = time.process_time() - began
