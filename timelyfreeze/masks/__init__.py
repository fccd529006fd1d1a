"""From a freeze ratio to the tensors of a stage that are frozen in one microbatch."""
