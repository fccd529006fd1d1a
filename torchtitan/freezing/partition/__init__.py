"""Where a model is cut into stages so that time, parameters or memory are even."""
