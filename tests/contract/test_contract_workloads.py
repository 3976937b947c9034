"""The contract of workloads: the tests are shipped, `pytest --pyargs torchwright.testing` runs them anywhere."""

from torchwright.testing.test_workloads import TestWorkload, workload

__all__ = ["TestWorkload", "workload"]
