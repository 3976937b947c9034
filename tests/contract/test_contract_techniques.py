"""The contract of techniques: the tests are shipped, `pytest --pyargs torchwright.testing` runs them anywhere."""

from torchwright.testing.test_techniques import TestDeclaration, TestOnModels

__all__ = ["TestDeclaration", "TestOnModels"]
