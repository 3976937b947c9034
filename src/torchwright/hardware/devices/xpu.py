"""XPU: Intel's GPUs, by PyTorch's own backend. Nobody has run it here."""

from __future__ import annotations

import torch

from torchwright.hardware.devices.accelerator import Accelerator


class XPU(Accelerator):
    """The current GPU of Intel."""

    name = "xpu"
    remedy = "install Intel's GPU driver and PyTorch for XPU (https://pytorch.org/get-started), or use --device cpu"

    @classmethod
    def unbuilt(cls) -> str | None:
        return None if torch.version.xpu else f"PyTorch {torch.__version__} is built without XPU"
