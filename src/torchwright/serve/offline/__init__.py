"""Requests without HTTP: the engine in the process that asks, for batches of files."""
