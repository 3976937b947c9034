"""The run file: its sections and the checks on them (no torch)."""
