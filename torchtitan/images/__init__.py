"""Pictures: their places, transforms, resumable batches, validation."""
