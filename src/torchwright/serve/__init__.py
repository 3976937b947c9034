"""An OpenAI-compatible server on the native decoder: an HTTP process and an engine process."""
