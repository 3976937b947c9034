"""torch's compiler caches, below this user's own cache folder.

torch keeps compiled code in the system's temporary folder, and loads libraries from it by the hash of their source.
Every user of the machine can guess and create the folder's name first (`torchinductor_NAME`). All code here that
compiles or restores compiled code calls `use_private_caches` first.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchwright.core.paths import private_cache, private_folder
from torchwright.core.process import folders

log = logging.getLogger("torchwright.optimization.caches")

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
INDUCTOR = "inductor"


def use_private_caches() -> Path:
    """Make torch compile into, and load from, a folder that only this user can write to; return that folder.

    A folder that the user chose (`TORCHINDUCTOR_CACHE_DIR`, and `TRITON_CACHE_DIR` for kernels of GPUs) is kept. Raises
    `UnsafeFolder` if others can write to it.
    """
    if kernels := os.environ.get("TRITON_CACHE_DIR"):
        private_folder(Path(kernels))
    chosen, own, fault = os.environ.get(VARIABLE), None, None
    try:
        own = private_cache(INDUCTOR)
    except OSError as error:
        fault = error
    if chosen and not _is_default(Path(chosen)):
        folder = private_folder(Path(chosen))
    elif own is not None:
        folder = own
    else:
        folder = folders.make_temporary().path
        log.warning("torchwright: compiled code is not kept for the next time (%s)", fault)
    os.environ[VARIABLE] = str(folder)
    _redirect_defaults(own or folder)
    return folder


def _is_default(folder: Path) -> bool:
    """Check for torch's own choice: torch sets the variable itself once the compiler is imported."""
    return folder.name.startswith("torchinductor_") and folder.parent == Path(tempfile.gettempdir())


def _redirect_defaults(folder: Path) -> None:
    """Replace torch's default folder where torch asks for it whatever the variable says: precompiled headers.

    Modules that were imported before hold the function by name, and `codecache` the folder itself.
    """
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")

    def private_default() -> str:
        return str(folder)

    for name, module in list(sys.modules.items()):
        if name.startswith("torch._inductor") and "default_cache_dir" in vars(module):
            module.default_cache_dir = private_default  # type: ignore[attr-defined]
    codecache: Any = sys.modules.get("torch._inductor.codecache")
    if codecache is not None:
        codecache._HEADER_DIR = str(folder / "precompiled_headers")
        codecache._HEADER_LOCK_DIR = str(folder / "precompiled_headers" / "locks")
