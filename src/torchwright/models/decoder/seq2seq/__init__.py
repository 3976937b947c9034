"""Text models of an encoder and a decoder: T5, BART, Marian, NLLB and others."""
