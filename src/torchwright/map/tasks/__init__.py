"""Tasks of a worker: one class for each task and kind of model."""
