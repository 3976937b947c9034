"""Workloads: what is run, on which inputs, and how its answers are judged."""

from torchwright.workloads.base import Case, Run, Workload, workloads

__all__ = ["Case", "Run", "Workload", "workloads"]
