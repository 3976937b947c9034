"""What torch.compile and our kernels' compiler made, on its way to another machine."""

from torchwright.caches.bundle import Bundle, pack, unpack

__all__ = ["Bundle", "pack", "unpack"]
