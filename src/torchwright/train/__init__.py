"""Training: layouts planned and proved, the trainer, its ledger, sparse embeddings, and why a run hangs."""
