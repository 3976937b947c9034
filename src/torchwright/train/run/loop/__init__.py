"""The training loop: one process's part of a run, and its evaluation."""
