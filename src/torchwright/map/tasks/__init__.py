"""What a worker does with rows: one class for each task and kind of model."""
