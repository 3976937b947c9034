"""Models of the hub that lie in huggingface_hub's cache: what there is, and how it goes. No torch here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from torchwright.core.errors import ModelError, TorchwrightError


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """One model of the hub's cache."""

    name: str
    """Its hub id."""
    bytes: int
    revisions: tuple[str, ...]
    """Branches and tags that were asked for, or the commit where none names it."""
    used: float
    """The time when one of its files was last read, in seconds since the epoch."""
    path: str


def cached_models() -> list[CachedModel]:
    """Return the models in the cache, the last used one first."""
    found = [
        CachedModel(
            name=repo.repo_id,
            bytes=repo.size_on_disk,
            revisions=tuple(sorted({name for revision in repo.revisions for name in _names(revision)})),
            used=repo.last_accessed,
            path=str(repo.repo_path),
        )
        for repo in _models(_scan())
    ]
    return sorted(found, key=lambda model: (-model.used, model.name))


def remove_cached(name: str) -> int:
    """Remove all revisions of a model from the cache, and return the bytes that are free again.

    Raises `ModelError` for a model that is not there, with the nearest name.
    """
    scanned = _scan()
    repos = {repo.repo_id: repo for repo in _models(scanned)}
    if name not in repos:
        near = difflib.get_close_matches(name, repos, n=1, cutoff=0.6)
        raise ModelError(
            f"'{name}' is not in the hub's cache" + (f"; did you mean {near[0]}?" if near else ""),
            next="`torchwright list` shows what is",
        )
    strategy = scanned.delete_revisions(*(revision.commit_hash for revision in repos[name].revisions))
    try:
        strategy.execute()
    except OSError as error:
        raise TorchwrightError(f"{name} cannot be removed", found=str(error)) from error
    return strategy.expected_freed_size


def _scan() -> Any:
    """Return the cache as huggingface_hub reads it, or None for a missing one."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _models(scanned: Any) -> list[Any]:
    return [] if scanned is None else [repo for repo in scanned.repos if repo.repo_type == "model"]


def _names(revision: Any) -> list[str]:
    return sorted(revision.refs) or [revision.commit_hash[:12]]
