"""What runs a prepared model: eagerly, through torch.compile, from packages compiled ahead of time."""
