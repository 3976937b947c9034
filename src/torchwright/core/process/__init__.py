"""Living safely with child processes, signals and temporary folders."""
