"""The contract for subclasses of torch's layers: `pytest --pyargs torchwright.testing` runs the same tests anywhere."""

from torchwright.testing.test_subclasses import (
    test_a_technique_keeps_what_a_subclass_computes,
    test_an_engine_keeps_what_a_subclass_computes,
)

__all__ = [
    "test_a_technique_keeps_what_a_subclass_computes",
    "test_an_engine_keeps_what_a_subclass_computes",
]
