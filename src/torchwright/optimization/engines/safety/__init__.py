"""Checks of an untrusted graph file, before torch reads it."""
