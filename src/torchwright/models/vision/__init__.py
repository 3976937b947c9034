"""Pictures in a prompt: files read, prepared as a model's processor does, and encoded into rows of embeddings."""
