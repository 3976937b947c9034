"""What is collected here comes from the package, which pytest would not rewrite the assertions of."""

import pytest

pytest.register_assert_rewrite("torchwright.testing")
