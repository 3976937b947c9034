"""The ExecuTorch target: delegates, 8-bit integers, language models, and .pte files read again."""
