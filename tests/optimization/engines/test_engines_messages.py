"""Messages: calls as text, and a warning that points at the caller's own line."""

from __future__ import annotations

import warnings

import torch

from torchwright.core.errors import SlowerCall
from torchwright.optimization.engines.dispatch.messages import say_slower, signature, text_of
from torchwright.optimization.engines.dispatch.spec import CallSpec, TensorSpec


def test_a_call_and_what_is_compiled_are_written_alike() -> None:
    spec = CallSpec(
        name="call",
        structure={"tuple": []},
        tensors=(TensorSpec(dtype="float32", shape=("rows", 3), order=(0, 1)),),
        sizes={"rows": (1, None)},
    )
    assert text_of(spec) == "(float32[rows, 3])"
    x = torch.zeros(2, 3)
    assert signature((x,), {}) == "(float32[2, 3])"
    assert signature((x, 4), {"b": [x, "y"], "a": None}) == "(float32[2, 3], 4, a=None, b=float32[2, 3]+'y')"


def test_a_long_value_is_cut() -> None:
    assert len(signature(("x" * 1000,), {})) == 62


def test_the_warning_points_at_the_callers_line() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        say_slower("by PyTorch's own operators")
    (warning,) = said
    assert warning.category is SlowerCall
    assert warning.filename == __file__
    assert str(warning.message) == (
        "a call goes a slower way: by PyTorch's own operators (said once for all such calls)"
    )
