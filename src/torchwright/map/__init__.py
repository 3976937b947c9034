"""Batch inference over files: rows in, results out, in parts that a restart keeps."""
