"""What a run does with the ranks of a frozen front: fewer of them, larger batches, the next one."""
