"""The loss of a step and the optimizer, with what adapts or rounds the model."""
