"""Export to other runtimes, one file a target, and the verifier that says what was lost on the way."""
