"""The backward that skips work: stages, masked backwards, clocks. Private names of torch are in ``torch_pipelining`` alone."""
