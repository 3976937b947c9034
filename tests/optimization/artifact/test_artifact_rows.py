"""How an artifact answers other numbers of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchwright as tw
from small_artifacts import INPUT, made, mlp
from torchwright.core.errors import SlowerCall
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.trial.batch_variants import BatchVariants
from torchwright.optimization.trial.session import TrialSession


@pytest.mark.slow
def test_no_rows_are_not_asked_of_templates_that_divide_by_their_number(
    tmp_path: Path,
) -> None:
    """MobileNetV3-small's artifact died of it (SIGFPE) while it was made, and the search ended with the original."""
    path = made(tmp_path, mlp(), ["compile", "max_autotune"])
    _, manifest = artifact.open_artifact(path)
    assert manifest.any_rows is not None
    assert [least for least, _ in manifest.any_rows.sizes.values()] == [1]
    model = tw.load(path).model
    for rows in (1, 3):
        torch.testing.assert_close(model(INPUT[:rows]), mlp()(INPUT[:rows]), rtol=1e-4, atol=1e-5)
    with pytest.warns(SlowerCall):
        assert model(INPUT[:0]).shape == (0, 8)


# Two packages are compiled.
@pytest.mark.slow
def test_one_row_is_answered_where_packages_check_their_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening an export sets this for the process; a package for any number of rows refused one there."""
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    path = made(tmp_path, mlp(), ["compile"])
    _, manifest = artifact.open_artifact(path)
    assert manifest.any_rows is not None
    assert max(least for least, _ in manifest.any_rows.sizes.values()) <= 1
    x = torch.randn(1, 16)
    torch.testing.assert_close(tw.load(path).model(x), mlp()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchwright.core.errors.SlowerCall")
def test_what_fails_with_other_rows_costs_the_recipe_these_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = TrialSession.choose_forms

    def dying(session: TrialSession, *, forms: BatchVariants, **rest: Any) -> Any:
        if forms.rows is not None:
            raise ZeroDivisionError
        return choose(session, forms=forms, **rest)

    monkeypatch.setattr(TrialSession, "choose_forms", dying)
    path = made(tmp_path, mlp(), ["compile"])
    recipe, manifest = artifact.open_artifact(path)
    assert (manifest.way, manifest.rows, manifest.any_rows) == ("package", "pieces", None)
    assert any(note.startswith("any number of rows: not used") for note in recipe.notes), recipe.notes
    model = tw.load(path).model
    for rows in (4, 9):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(model(x), mlp()(x), rtol=1e-4, atol=1e-5)
