"""The formats of quantized checkpoints, one file each."""
