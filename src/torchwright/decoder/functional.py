"""The one place where the decoder chooses its kernels."""

from torchwright.kernels import ops

__all__ = ["ops"]
