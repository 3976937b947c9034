"""The processes of a run, its folder, its checkpoints and its data."""
