"""The contract of engines: the tests are shipped, `pytest --pyargs torchwright.testing` runs them anywhere."""

from torchwright.testing.test_engines import (
    TestArtifact,
    TestDeclaration,
    TestEngine,
    engine,
    numbers,
    registered,
    test_numbers_are_pytorchs_or_an_error_says_why,
    test_what_changes_its_inputs_is_refused_or_changes_them,
)

__all__ = [
    "TestArtifact",
    "TestDeclaration",
    "TestEngine",
    "engine",
    "numbers",
    "registered",
    "test_numbers_are_pytorchs_or_an_error_says_why",
    "test_what_changes_its_inputs_is_refused_or_changes_them",
]
