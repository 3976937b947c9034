"""The contract for instances of a model's own classes: `pytest --pyargs torchwright.testing` runs it anywhere."""

from torchwright.testing.test_instances import (
    test_a_technique_keeps_the_classes,
    test_an_engine_and_its_artifacts_keep_the_classes,
)

__all__ = ["test_a_technique_keeps_the_classes", "test_an_engine_and_its_artifacts_keep_the_classes"]
