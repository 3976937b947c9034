"""The contract of workloads: the tests are shipped, `pytest --pyargs torchwright.testing` runs them anywhere."""

from torchwright.testing.test_workloads import TestWorkload, reference, workload

__all__ = ["TestWorkload", "reference", "workload"]
