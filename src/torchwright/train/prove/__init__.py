"""Layouts proved on one machine: a small model in each combination of axes against the same model on one process."""

from torchwright.train.prove.diagnose import Divergence
from torchwright.train.prove.processes import ProveError
from torchwright.train.prove.proof import LayoutProof, Proof, prove, prove_file, prove_layout

__all__ = ["Divergence", "LayoutProof", "Proof", "ProveError", "prove", "prove_file", "prove_layout"]
