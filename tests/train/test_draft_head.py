"""A head in training: its steps against the served chain, its loss against a loop, its file by SpecForge's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY, build, save

import drafts
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.draft import load_draft
from torchwright.models.decoder.draft.eagle import EagleDraft
from torchwright.models.decoder.draft.mtp import MtpDraft
from torchwright.train.data.shards import Shards
from torchwright.train.draft.config import HeadSection
from torchwright.train.draft.files import file_tensors, new_head, started_head, write_head
from torchwright.train.draft.head import EagleHead
from torchwright.train.draft.mtp_head import MtpHead
from torchwright.train.draft.objective import DraftBatch, DraftLoss, DraftModel
from torchwright.train.draft.shape import frequent_tokens
from torchwright.train.draft.target import TargetModel
from torchwright.train.run.objectives.objective import MicroBatch

STEPS, DRAFT_TOKENS = 3, 48


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = save(build("llama"), tmp_path_factory.mktemp("target"))
    return TargetModel(str(folder), "fp32", None, "cpu")


def token_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def made(target: TargetModel, folder: Path, **section: Any) -> EagleHead:
    """A new head with random norms, written to `folder`."""
    ids_D = np.sort(np.random.default_rng(1).permutation(VOCABULARY)[:DRAFT_TOKENS])
    head, config = new_head(HeadSection(**section), ids_D, target, seed=3)
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=random) / parameter.shape[-1] ** 0.5
    write_head(file_tensors(head, target, torch.float32), config, folder)
    return head


def served_chain(
    draft: EagleDraft | MtpDraft, ids_T: torch.Tensor, features_TF: torch.Tensor, slot: int, steps: int
) -> list[torch.Tensor]:
    """The states of a chain that a served draft begins at `slot`, over the text's own tokens."""
    layer = draft.config if isinstance(draft, MtpDraft) else draft.config.layer
    cache = PagedCache(layer, pages=4, dtype=torch.float32, draft=draft.page_shapes)
    sequence = cache.sequence(slot + 1)
    with torch.inference_mode():
        batch = cache.append([(sequence, ids_T[1 : slot + 2].tolist())])
        states = [draft(batch, features_TF[: slot + 1], cache.draft)[-1]]
        for step in range(1, steps):
            cache.hold(sequence, step)
            batch = cache.ahead([(sequence, int(ids_T[slot + 1 + step]))], step - 1)
            states.append(draft(batch, states[-1][None], cache.draft)[0])
    return states


def assert_served_alike(head: EagleHead | MtpHead, draft: EagleDraft | MtpDraft) -> None:
    """Every slot of two documents in a window, three steps: states and proposals."""
    ids_BT, documents_BT = token_ids(1, 20), torch.tensor([[0] * 8 + [8] * 12])
    wide = 64 * len(head.observed)
    features_BTF = torch.randn(1, 20, wide, generator=torch.Generator().manual_seed(5))
    positions_BT = torch.arange(20)[None] - documents_BT
    with torch.no_grad():
        chains = [*head.chains(ids_BT, features_BTF, positions_BT, documents_BT, STEPS)]
    for begin, end in ((0, 8), (8, 20)):
        for slot in range(end - begin - STEPS):
            own = slice(begin, end)
            served = served_chain(draft, ids_BT[0, own], features_BTF[0, own], slot, STEPS)
            for step, state in enumerate(served):
                trained = chains[step][0, begin + slot]
                torch.testing.assert_close(trained, state, rtol=1e-4, atol=1e-4)
                with torch.no_grad():
                    logits_D = head.answer(trained)
                token, share = drafts.most_likely(draft, state[None])
                assert token == [int(head.ids[logits_D.argmax()])]
                assert share[0] == pytest.approx(float(logits_D.softmax(-1).max()), abs=1e-4)


def test_unrolled_steps_are_the_served_chain(target: TargetModel, tmp_path: Path) -> None:
    head = made(target, tmp_path / "head")
    draft = load_draft(tmp_path / "head", target.loaded)
    assert isinstance(draft, EagleDraft)
    assert_served_alike(head, draft)


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_head_trained_elsewhere_goes_on(layout: str, target: TargetModel, tmp_path: Path) -> None:
    """It computes what is served, and is written again with the same numbers, in SpecForge's layout."""
    folder = drafts.write_head(target.folder, tmp_path / "theirs", layout=layout)
    theirs, config = started_head(str(folder), target)
    draft = load_draft(folder, target.loaded)
    assert isinstance(draft, EagleDraft)
    assert_served_alike(theirs, draft)
    write_head(file_tensors(theirs, target, torch.float32), config, tmp_path / "ours")
    again = load_draft(tmp_path / "ours", target.loaded)
    assert isinstance(again, EagleDraft)
    assert again.observed == draft.observed
    assert_served_alike(theirs, again)


def test_the_file_has_specforges_names_shapes_and_types(target: TargetModel, tmp_path: Path) -> None:
    """The tensors equal those of published heads; the embedding is the target's, and is left out."""
    made(target, tmp_path / "head")
    found = load_file(tmp_path / "head" / "model.safetensors")
    config = json.loads((target.folder / "config.json").read_text())
    wanted = drafts.head_tensors(config, draft_vocabulary=DRAFT_TOKENS, own_embedding=False)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in wanted.items()
    }
    assert (found["d2t"] + torch.arange(DRAFT_TOKENS)).tolist() == found["t2d"].nonzero().flatten().tolist()
    described = json.loads((tmp_path / "head" / "config.json").read_text())
    wanted = drafts.head_config(config, draft_vocabulary=DRAFT_TOKENS)
    shared = {key: value for key, value in wanted.items() if key != "rope_parameters"}
    assert {key: described[key] for key in shared} == shared
    assert described["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 0, 1]


def windows(seed: int = 0) -> MicroBatch:
    """Two windows of two documents each, of which some tokens are not trained on."""
    ids_BT = token_ids(2, 24, seed=seed)
    labels_BT = ids_BT.roll(-1, 1)
    labels_BT[:, :3] = labels_BT[:, 10:14] = labels_BT[:, -1] = -100
    documents_BT = torch.tensor([[0] * 9 + [9] * 15, [0] * 17 + [17] * 7])
    return MicroBatch(
        ids_BT=ids_BT,
        labels_BT=labels_BT,
        positions_BT=torch.arange(24) - documents_BT,
        documents_BS=documents_BT,
    )


def test_states_are_those_of_each_document_alone(target: TargetModel) -> None:
    batch = windows()
    states = target.hidden_states((0, 1, 2), batch.ids_BT, batch.labels_BT, batch.documents_BS)
    for row, begin, end in ((0, 0, 9), (0, 9, 24), (1, 0, 17), (1, 17, 24)):
        logits_TV = target.loaded.logits(batch.ids_BT[row : row + 1, begin:end])[0]
        chances_TV, best_T = target.probabilities(states.final_BTE[row, begin:end], torch.arange(VOCABULARY))
        torch.testing.assert_close(chances_TV, logits_TV.softmax(-1), rtol=1e-4, atol=1e-6)
        assert torch.equal(best_T, logits_TV.argmax(-1))
        embedded_TE = target.decoder.embedding[batch.ids_BT[row, begin:end]]
        assert torch.equal(states.observed_BTF[row, begin:end, :64], embedded_TE)


def test_the_loss_is_the_formula(target: TargetModel, tmp_path: Path) -> None:
    """Place by place: cross entropy with the target's probabilities, agreement, overlap and whole chains."""
    head = made(target, tmp_path / "head")
    model, batch = DraftModel(head, target, STEPS, 0.5), windows()
    states = target.hidden_states(head.config.observed, batch.ids_BT, batch.labels_BT, batch.documents_BS)
    total, sums_S5 = model.loss(DraftBatch(windows=batch, states=states))
    assert batch.positions_BT is not None
    assert batch.documents_BS is not None
    chains = [
        state.detach()
        for state in head.chains(
            batch.ids_BT, states.observed_BTF, batch.positions_BT, batch.documents_BS, STEPS
        )
    ]
    wanted = [[0.0] * 5 for _ in range(STEPS)]
    for row in range(2):
        for slot in range(24):
            right = True
            for step in range(STEPS):
                place = slot + 1 + step
                inside = place < 24 and batch.documents_BS[row, place] == batch.documents_BS[row, slot]
                if not inside or batch.labels_BT[row, place] < 0:
                    right = False
                    continue
                p_ND, best = target.probabilities(states.final_BTE[row, place][None], head.ids)
                log_D = head.answer(chains[step][row, slot]).log_softmax(-1).detach()
                agree = int(head.ids[log_D.argmax()]) == int(best)
                right = right and agree
                loss = -float((p_ND[0] * log_D).sum())
                overlap = float(torch.minimum(p_ND[0], log_D.exp()).sum())
                for column, value in enumerate((1, loss, agree, overlap, right)):
                    wanted[step][column] += value
    torch.testing.assert_close(sums_S5, torch.tensor(wanted), rtol=1e-4, atol=1e-4)
    weights = [1, 0.5, 0.25]
    expected = sum(w * row[1] for w, row in zip(weights, wanted, strict=True)) / sum(weights)
    assert float(total.detach()) == pytest.approx(expected, rel=1e-4)
    assert int(DraftLoss(model).count(DraftBatch(windows=batch, states=states))) == wanted[0][0]


def test_a_step_learns_what_the_target_says(target: TargetModel, tmp_path: Path) -> None:
    """Gradient steps on one batch: proposals come to agree with the target at every position."""
    head = made(target, tmp_path / "head")
    model, batch = DraftModel(head, target, STEPS, 0.8), windows()
    states = target.hidden_states(head.config.observed, batch.ids_BT, batch.labels_BT, batch.documents_BS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    overlaps = []
    for _ in range(30):
        total, sums_S5 = model.loss(DraftBatch(windows=batch, states=states))
        overlaps.append(float(sums_S5[:, 3].sum() / sums_S5[:, 0].sum()))
        total.div(sums_S5[0, 0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    known = target.probabilities(states.final_BTE[batch.labels_BT >= 0], head.ids)[0].sum(-1).mean()
    assert overlaps[-1] > overlaps[0] + 0.1
    assert overlaps[-1] > 0.7 * float(known), "most of what the head's vocabulary can reach"


def test_frequent_tokens_are_counted_where_they_are_trained_on(tmp_path: Path) -> None:
    tokens = np.array([5, 5, 5, 9, 9, 7, 8, 8, 8, 8], np.uint16)
    trained = np.array([0, 1, 1, 1, 1, 1, 0, 0, 0, 0], np.uint8)
    path = tmp_path / "part.safetensors"
    save_file(
        {
            "tokens": torch.from_numpy(tokens),
            "trained": torch.from_numpy(trained),
            "starts": torch.tensor([0]),
        },
        path,
    )
    shards = [Shards([path], 12)]
    assert frequent_tokens(shards, 12, 3, ()).tolist() == [5, 7, 9]
    assert frequent_tokens(shards, 12, 3, (2,)).tolist() == [2, 5, 9]
    assert frequent_tokens(shards, 12, 12, ()).tolist() == [*range(12)]
