"""Training of draft models for speculative decoding."""
