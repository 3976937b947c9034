"""HPU: Intel's Gaudi accelerators, by the package habana_frameworks. Nobody has run it here."""

from __future__ import annotations

from torchwright.hardware.devices.accelerator import Accelerator


class HPU(Accelerator):
    """The current Gaudi accelerator."""

    name = "hpu"
    package = "habana_frameworks.torch"
    uncompiled = "Inductor, which compiles here, makes no code for hpu"
    remedy = (
        "use the container of Intel Gaudi's PyTorch, whose habana_frameworks fits it, or use --device cpu"
    )
