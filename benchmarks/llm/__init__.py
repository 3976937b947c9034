"""Benchmarks of language models and encoder-decoders."""
