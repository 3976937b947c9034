"""Bundles of compiled code, from torch.compile and our kernels' compiler, for other machines."""

from torchwright.optimization.caches.bundle import Bundle, pack, unpack

__all__ = ["Bundle", "pack", "unpack"]
