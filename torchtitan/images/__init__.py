"""Pictures: where they come from, what is done to them, resumable batches, validation."""
