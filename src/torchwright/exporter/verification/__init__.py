"""The verifier: a package in its own runtime against the original, layer by layer."""
