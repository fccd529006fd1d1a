"""From times to freeze ratios: the linear program, its solvers, and the plan that comes out."""
