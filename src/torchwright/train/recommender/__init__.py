"""Recommenders from one file: DLRM and two towers over the 2D embeddings, from clicks in files to a report."""
