"""Where a batch enters a pipeline whose front is frozen, and what its front need not keep."""
