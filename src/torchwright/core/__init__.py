"""Errors, records, registries, files and processes: values and helpers that every department uses."""
