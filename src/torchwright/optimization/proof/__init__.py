"""Proof: the recipe as an artifact, loaded in a fresh process and compared with the original once more."""
