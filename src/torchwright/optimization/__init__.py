"""The measured search for a faster model: techniques, engines, trials, and the artifact that ships."""
