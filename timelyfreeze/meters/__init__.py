"""What freezing does to weights and gradients on this rank, measured."""
