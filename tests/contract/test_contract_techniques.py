"""The contract of techniques: the tests are shipped, `pytest --pyargs torchwright.testing` runs them anywhere."""

from torchwright.testing.test_techniques import (
    TestDeclaration,
    TestOnModels,
    test_rows_do_not_influence_each_other_where_an_engine_runs_them,
)

__all__ = [
    "TestDeclaration",
    "TestOnModels",
    "test_rows_do_not_influence_each_other_where_an_engine_runs_them",
]
