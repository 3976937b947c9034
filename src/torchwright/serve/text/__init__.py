"""Text in and out of token ids, without torch."""
