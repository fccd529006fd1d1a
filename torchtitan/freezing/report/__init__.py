"""What a run tells: metrics, TensorBoard, status, plots, the report at its end."""
