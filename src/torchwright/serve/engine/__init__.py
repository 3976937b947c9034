"""The engine's process: requests in, one batch a step, tokens out."""
