"""One run: its file, its loop, its checkpoints."""
