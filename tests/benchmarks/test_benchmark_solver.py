import gain as benchmark


def test_a_row_of_the_solver_table() -> None:
    row = benchmark.time_solver("GPipe", "2x4", repeats=2)
    assert (row["schedule"], row["ranks x microbatches"], row["actions"]) == ("GPipe", "2x4", 16)
    # 2 x 7 edges along the ranks, 4 + 4 across, one from the last backward to the end, 2 budgets.
    assert row["rows"] == 14 + 8 + 1 + 2
    assert float(row["above the lower bound, at most"].rstrip("%")) < 0.1
