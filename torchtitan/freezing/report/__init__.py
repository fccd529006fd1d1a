"""Output of a run: metrics, TensorBoard, status, plots, the report at its end."""
