"""The error of sound that cannot be read."""

from torchwright.core.errors import WorkloadError


class SoundError(WorkloadError, ValueError):
    """Sound that cannot be read: what it is, and where."""
