"""The one place where the decoder chooses its kernels."""

from torchwright.kernels import reference as ops

__all__ = ["ops"]
