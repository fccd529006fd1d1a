"""Where a batch enters a pipeline whose front is frozen, and stages that it may pass by."""
