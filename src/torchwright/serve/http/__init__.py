"""Connections, limits and paths: what a client reaches."""
