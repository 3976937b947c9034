"""Training: the model, its data and parallelism, runs of it, and layouts that are planned and proved."""
