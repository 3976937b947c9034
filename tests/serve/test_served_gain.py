"""The gain of a trained draft: rows with intervals within a time, and an acceptance that cannot be is an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from engine_support import alone, answered, request, tiny_decoder, words
from test_draft_mtp import with_mtp
from test_engine_draft import engine

import drafts
from torchwright.core.errors import ModelError
from torchwright.models.decoder import LoadedDecoder, load_decoder
from torchwright.models.decoder.draft import load_draft
from torchwright.models.decoder.draft.draft import Likeliest
from torchwright.models.decoder.draft.small import SmallDraft
from torchwright.serve.engine.served_gain import served_gain
from torchwright.train.draft.mtp_files import mtp_head, mtp_tensors, write_mtp
from torchwright.train.draft.target import TargetModel

PROMPTS = [words(9 + place, seed=place) for place in range(6)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    return tiny_decoder("llama", tmp_path_factory.mktemp("target"))


def test_each_setting_has_a_ratio_and_its_interval(llama: LoadedDecoder, tmp_path: Path) -> None:
    folder = drafts.write_head(llama.folder, tmp_path / "head")
    rows = served_gain(llama, folder, PROMPTS, seconds=0.4, agree=0.1)
    assert [(row["batch"], row["temperature"]) for row in rows] == [(1, 0.0), (1, 0.8), (4, 0.0), (4, 0.8)]
    for row in rows:
        assert row["verdict"] in ("gains", "loses", "open")
        if row["speedup"] is not None:
            assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
            assert (row["verdict"] == "open") == (row["speedup_low"] <= 1 <= row["speedup_high"])


def test_no_time_decides_nothing(llama: LoadedDecoder, tmp_path: Path) -> None:
    rows = served_gain(
        llama, drafts.write_head(llama.folder, tmp_path / "head"), PROMPTS, seconds=1e-6, agree=0.1
    )
    assert [(row["rounds"], row["speedup"], row["verdict"]) for row in rows] == [(0, None, "open")] * 4


def test_proposals_that_are_never_right_are_an_error(
    llama: LoadedDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of the wrong kind is served all the same: an acceptance of nothing, where training saw another."""
    twin, best = Path(shutil.copytree(llama.folder, tmp_path / "twin")), SmallDraft.likeliest

    def wrong(draft: SmallDraft, hidden_NE: torch.Tensor, count: int) -> Likeliest:
        found = best(draft, hidden_NE, count)
        return found._replace(tokens_NK=(found.tokens_NK + 1) % llama.config.vocabulary)

    assert len(served_gain(llama, twin, PROMPTS, seconds=1e-6, agree=0.9)) == 4
    monkeypatch.setattr(SmallDraft, "likeliest", wrong)
    monkeypatch.setattr(SmallDraft, "unplanned", "proposals of a test")  # or the kernels would propose
    with pytest.raises(ModelError, match=r"none of \d+ first proposals accepted"):
        served_gain(llama, twin, PROMPTS, seconds=1e-6, agree=0.9)
    assert len(served_gain(llama, twin, PROMPTS, seconds=1e-6, agree=0.01)) == 4


@pytest.mark.plain("deepseek-v3")
@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe", "deepseek-v3"])
def test_answers_are_those_without_a_trained_layer(name: str, tmp_path: Path) -> None:
    """An MTP layer in a folder of its own, as training writes it."""
    with_mtp(name, tmp_path / "model")
    target = TargetModel(str(tmp_path / "model"), "bf16", None, "cpu")
    head, _ = mtp_head(None, target, torch.bfloat16, 0)
    write_mtp(mtp_tensors(head, torch.bfloat16), target, tmp_path / "layer")
    loaded = load_decoder(tmp_path / "model", torch.bfloat16)
    submits = [
        request(str(i), words(5 + 7 * i, seed=i), 24, seed=i, temperature=[0.0, 0.9][i % 2]) for i in range(3)
    ]
    found = answered(engine(loaded, load_draft(tmp_path / "layer", loaded)), submits)
    assert sum(result.timing.speculated_tokens for result in found.values() if result.timing) > 0
    for submit in submits:
        assert found[submit.id, 0].tokens == alone(loaded, submit)[0].tokens
