"""The environment of a measurement: versions, device and threads."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from torchwright.core.records import Fingerprint
from torchwright.hardware.devices import get_device

LIBRARIES = ("transformers", "torchao", "safetensors", "tokenizers", "numpy")


def fingerprint_here(
    device: str | None = None, *, measured: bool = True, threads: int | None = None
) -> Fingerprint:
    """Describe this machine and its versions.

    `measured=False` leaves out the device's ceilings, which take seconds. `threads` are those that were measured with.
    """
    found = get_device(device)
    libraries: dict[str, str] = {}
    most = torch.get_num_threads()
    for name in LIBRARIES:
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            continue
    return Fingerprint(
        torchwright=version("torchwright"),
        torch=torch.__version__,
        libraries=libraries,
        python=platform.python_version(),
        device=found.facts() if measured else found.identify(),
        threads=threads or most,
        most_threads=most if threads and threads < most else None,
    )
