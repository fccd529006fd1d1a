"""Pipeline schedules: actions, their order on each rank, and the graph of what waits for what."""
