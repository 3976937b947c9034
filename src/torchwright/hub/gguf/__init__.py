"""GGUF files: metadata, tensors in blocks, tokenizer. Written from the format's published description (ggml, v3)."""
