"""The one place where the decoder chooses its kernels."""

from torchwright.hardware.kernels import ops

__all__ = ["ops"]
