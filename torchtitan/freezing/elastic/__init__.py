"""Uses of a frozen front's ranks: a shorter pipeline, larger batches, the next batch."""
