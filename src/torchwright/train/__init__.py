"""Training: models, data and parallelism, runs, and layouts that are planned and proved."""
