"""MTP layers of published checkpoints, against a one-layer model of transformers whose input is joined by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import build, save, token_ids

import drafts
from torchwright.core.errors import ModelError
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.draft import load_draft
from torchwright.models.decoder.draft.mtp import MtpDraft

E, EPS = 64, 1e-6
ONE_LAYER: dict[str, dict[str, Any]] = {
    "qwen3-next": {"layer_types": ["full_attention"], "mlp_only_layers": []},
    "qwen3.5": {"layer_types": ["full_attention"]},
    "qwen3.5-moe": {"layer_types": ["full_attention"]},
    "glm4-moe": {"first_k_dense_replace": 0},
    "deepseek-v3": {"first_k_dense_replace": 0},
    "deepseek-v3-halves": {"first_k_dense_replace": 0},
}


def with_mtp(name: str, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Save a tiny model with an MTP layer's tensors; these, and the one-layer model whose layer it is."""
    save(build(name), folder)
    one = build(name, seed=7, num_hidden_layers=1, **ONE_LAYER[name])
    random = torch.Generator().manual_seed(3)
    own = {key: torch.randn(E, generator=random) * 0.2 + 1 for key in ("embedding", "hidden")}
    join_NK = torch.randn(E, 2 * E, generator=random) * 0.15
    # As it is written: experts one by one, where transformers holds them stacked.
    state = load_file(save(one, folder / "one") / "model.safetensors")
    qwen = name.startswith("qwen")
    prefix = "mtp.layers.0" if qwen else "model.layers.3"
    renamed = {
        key.replace("model.layers.0", prefix, 1): value
        for key, value in state.items()
        if key.startswith("model.layers.0.")
    }
    renamed |= (
        {
            "mtp.fc.weight": join_NK,
            "mtp.pre_fc_norm_embedding.weight": own["embedding"],
            "mtp.pre_fc_norm_hidden.weight": own["hidden"],
            "mtp.norm.weight": state["model.norm.weight"],
        }
        if qwen
        else {
            f"{prefix}.eh_proj.weight": join_NK,
            f"{prefix}.enorm.weight": own["embedding"],
            f"{prefix}.hnorm.weight": own["hidden"],
            f"{prefix}.shared_head.norm.weight": state["model.norm.weight"],
        }
    )
    file = folder / "model.safetensors"
    renamed = {key: value.clone().contiguous() for key, value in renamed.items()}
    save_file(load_file(file) | renamed, file, metadata={"format": "pt"})
    return own | {"join": join_NK}, one


def norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    return x_TE * torch.rsqrt(x_TE.square().mean(-1, keepdim=True) + eps) * weight_E


@pytest.mark.parametrize("name", ONE_LAYER)
def test_an_mtp_layer_is_the_familys_own_layer(name: str, tmp_path: Path) -> None:
    own, one = with_mtp(name, tmp_path)
    loaded = load_decoder(tmp_path)
    draft = load_draft("mtp", loaded)
    assert isinstance(draft, MtpDraft)
    assert draft.observed == (3,)
    ids_T = token_ids(17)
    states_TE = torch.randn(17, E, generator=torch.Generator().manual_seed(5))
    config = loaded.decoder.config
    offset, eps = config.norm_offset, config.eps
    joined = [
        norm(loaded.decoder.embedding[ids_T], own["embedding"] + offset, eps),
        norm(states_TE, own["hidden"] + offset, eps),
    ]
    with torch.inference_mode():
        x_TE = torch.cat(joined, dim=1) @ own["join"].T
        wanted_TE = one.model(inputs_embeds=x_TE[None]).last_hidden_state[0]
        logits_TV = wanted_TE @ loaded.decoder.embedding.T
        cache = PagedCache(config, pages=4, dtype=torch.float32, draft=draft.page_shapes, states=2)
        sequence, found = cache.sequence(17), []
        for chunk in (slice(0, 6), slice(6, 17)):
            batch = cache.append([(sequence, ids_T[chunk].tolist())])
            found.append(draft(batch, states_TE[chunk], cache.draft))
        found_TE = torch.cat(found)
        tokens, _ = drafts.most_likely(draft, found_TE)
    torch.testing.assert_close(found_TE, wanted_TE, rtol=1e-4, atol=1e-4)
    if config.tied:
        assert tokens == logits_TV.argmax(-1).tolist()


def stack_experts(file: Path) -> None:
    """Put the experts of every layer in a file into two tensors, as published files of Qwen3.5 hold them."""
    tensors, stacked = load_file(file), dict[str, list[torch.Tensor]]()
    for name in sorted(tensors, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()]):
        layer, found, rest = name.partition(".experts.")
        if found:
            stacked.setdefault(f"{layer}.experts.{rest.split('.')[1]}", []).append(tensors.pop(name))
    for name in [name for name in stacked if name.endswith("gate_proj")]:
        layer = name.removesuffix("gate_proj")
        gate, up, down = (torch.stack(stacked[f"{layer}{part}_proj"]) for part in ("gate", "up", "down"))
        tensors |= {f"{layer}gate_up_proj": torch.cat([gate, up], dim=1), f"{layer}down_proj": down}
    save_file(tensors, file, metadata={"format": "pt"})


def test_experts_in_two_tensors_are_those_one_by_one(tmp_path: Path) -> None:
    """The model holds its experts so (Qwen3.5-35B-A3B), or the MTP layer does too (Qwen3.6)."""
    with_mtp("qwen3.5-moe", tmp_path)
    loaded = load_decoder(tmp_path)
    draft, logits_BTV = load_draft("mtp", loaded), loaded.logits(token_ids(9)[None])
    stack_experts(tmp_path / "model.safetensors")
    again = load_decoder(tmp_path)
    assert torch.equal(again.logits(token_ids(9)[None]), logits_BTV)
    state = load_draft("mtp", again).state_dict()
    assert all(tensor.equal(state[name]) for name, tensor in draft.state_dict().items())


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    save(build("qwen3.5"), tmp_path / "a")
    with pytest.raises(ModelError, match="has no MTP layer"):
        load_draft("mtp", load_decoder(tmp_path / "a"))
    save(build("llama"), tmp_path / "b")
    with pytest.raises(ModelError, match="not known here"):
        load_draft("mtp", load_decoder(tmp_path / "b"))
