"""Text generation: a loaded decoder, sampling, the tokenizer, and transformers as the fallback."""
