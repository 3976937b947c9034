import pickle
from typing import Any

import pytest

from torchwright.core import errors
from torchwright.core.errors import (
    ArtifactError,
    Inconclusive,
    RegressionFound,
    TechniqueFailed,
    TorchwrightError,
    UnknownName,
    abbreviated,
    shown,
    unknown,
)

TREE = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, TorchwrightError)
]


def test_the_message_is_one_paragraph_of_sentences():
    error = TorchwrightError(
        "the folder 'x' was asked for", found="no config.json", allowed="a model folder.", next="ls x"
    )
    assert str(error) == (
        "the folder 'x' was asked for. Found: no config.json. Allowed: a model folder. Next: ls x."
    )
    assert "\n" not in str(error)


def test_half_a_character_can_be_written_down():
    """As JSON gives it where a file says so; every clause may name it."""
    error = TorchwrightError("no \ud800", found="\udfff", allowed="a\ud800", next="b")
    assert str(error).encode() == b"no \\ud800. Found: \\udfff. Allowed: a\\ud800. Next: b."
    assert error.reason == "no \\ud800: \\udfff"


def test_clauses_that_are_not_given_are_left_out():
    assert str(TorchwrightError("it failed!")) == "it failed!"
    assert str(TorchwrightError("it failed", next="try again")) == "it failed. Next: try again."


@pytest.mark.parametrize("cls", TREE)
def test_an_error_survives_the_way_between_processes(cls):
    error = cls("summary", found="a", allowed="b", next="c")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert (again.summary, again.found, again.allowed, again.next) == ("summary", "a", "b", "c")


@pytest.mark.parametrize("cls", TREE)
def test_what_a_user_can_mend_exits_with_2_and_a_verdict_with_its_own_code(cls):
    assert cls.exit_code == {TechniqueFailed: 1, RegressionFound: 1, Inconclusive: 3}.get(cls, 2)


def test_the_tree_at_the_top_of_the_file_names_every_error():
    assert errors.__doc__
    for cls in TREE:
        assert cls.__name__ in errors.__doc__


def test_unknown_suggests_the_nearest_name_and_lists_the_allowed_ones():
    error = unknown("technique", "dtipe", ["dtype", "compile"], next="look")
    assert isinstance(error, UnknownName)
    assert str(error) == (
        "unknown technique 'dtipe'; did you mean 'dtype'? Allowed: compile, dtype. Next: look."
    )


def test_unknown_suggests_nothing_where_nothing_is_near():
    assert "did you mean" not in str(unknown("option", "zzz", ["dtype"]))
    assert str(unknown("option", "zzz", [])) == "unknown option 'zzz'. Allowed: none."


def test_one_handler_catches_them_all():
    with pytest.raises(TorchwrightError, match="damaged"):
        raise ArtifactError("the artifact is damaged")


def test_no_clause_prints_more_than_a_screen_of_a_value():
    error = TorchwrightError("s" * 10_000, found="f" * 10_000, allowed="a" * 10_000)
    assert len(error.summary) <= errors.MOST_OF_VALUE
    assert error.found is not None
    assert len(error.found) <= errors.MOST_OF_VALUE
    assert error.found.endswith("(10,000 characters)")
    assert len(str(error)) < 2 * errors.MOST_OF_VALUE + errors.MOST_OF_CHOICES + 100
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)


@pytest.mark.parametrize("most", [60, 500])
@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, list(range(10_000)), {str(n): n for n in range(10_000)}, 10**400, [["y" * 9_000] * 9] * 9],
    ids=["text", "list", "dict", "number", "nested"],
)
def test_a_value_is_shown_short(value: object, most: int):
    assert 0 < len(shown(value, most)) <= most


def test_small_values_are_shown_whole_and_tensors_by_their_shape():
    import numpy as np
    import torch

    assert shown({"a": [1, "b"]}) == "{'a': [1, 'b']}"
    assert shown([torch.zeros(3, 4, dtype=torch.int64)]) == "[Tensor int64[3, 4]]"
    assert shown(np.zeros((2, 2), np.float32)) == "ndarray float32[2, 2]"
    assert abbreviated("short") == "short"


def test_instances_are_shown_by_their_fields_and_short():
    import torch

    from torchwright.testing.instances import Batch, Hidden, Output, Pair

    x = torch.zeros(3, 4)
    assert shown(Hidden(x)) == "Hidden(values=Tensor float32[3, 4], name='hidden')"
    assert shown(Pair(x, x)) == "Pair(low=Tensor float32[3, 4], high=Tensor float32[3, 4])"
    assert shown(Output(logits=x)) == "Output(logits=Tensor float32[3, 4], states=None)"
    inner: list[Any] = [Batch(x, extras=[x] * 1_000_000)] * 1_000
    deep = Batch(x, extras=inner)
    for most in (60, 500):
        assert len(shown(deep, most)) <= most
        assert len(shown(Hidden(x, "n" * 10_000), most)) <= most


def test_a_value_whose_repr_fails_is_shown_all_the_same():
    class Broken:
        def __repr__(self) -> str:
            raise ValueError("no")

    assert "Broken" in shown(Broken())
