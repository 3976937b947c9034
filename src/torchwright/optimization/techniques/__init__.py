"""One technique per file; `base.py` holds the contract and the registry."""

from torchwright.optimization.techniques.base import Phase, Settings, Target, Technique, techniques

__all__ = ["Phase", "Settings", "Target", "Technique", "techniques"]
