"""A frozen front: where batches enter behind it, what is kept of it, ranks that it frees."""
