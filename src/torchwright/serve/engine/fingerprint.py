"""A short name for a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

SAMPLES, SAMPLE_BYTES = 8, 256


def fingerprint(model: nn.Module) -> str:
    """Return a digest of every tensor's name, dtype and shape, and of a sample of all values.

    Large tensors are sampled, so that memory-mapped weights are not read as a whole. The digest tells models with
    different training apart, and is not a defence against a model made to deceive.
    """
    digest = hashlib.blake2b(digest_size=12)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        step = max(SAMPLE_BYTES, len(data) // SAMPLES)
        for start in range(0, len(data), step):
            digest.update(data[start : start + SAMPLE_BYTES].cpu().numpy().tobytes())
    return digest.hexdigest()


def fingerprint_of_files(files: Iterable[Path]) -> str:
    """The same of files of weights that nobody has in memory as they are: of their names, sizes and samples."""
    digest = hashlib.blake2b(digest_size=12)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.parent.name}/{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
