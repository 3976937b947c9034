"""MTP layers in training: as they are served, under the checkpoint's own names, resumed bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runs import assert_same, checkpoints, losses, run_processes, state
from safetensors.torch import load_file
from test_draft_head import assert_served_alike, token_ids
from test_draft_mtp import stack_experts, with_mtp
from test_draft_run import copy_until, make_draft, train
from tiny import build, save

import drafts
from torchwright.core.errors import ModelError, TorchwrightError
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.draft import load_draft
from torchwright.models.decoder.draft.mtp import MtpDraft
from torchwright.train.draft.mtp_files import mtp_head, mtp_tensors, write_merged, write_mtp
from torchwright.train.draft.mtp_head import MtpHead
from torchwright.train.draft.target import TargetModel
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.runtime.checkpoint import CheckpointError

MODELS = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "glm4-moe", "deepseek-v3", "deepseek-v3-halves")
PUBLISHED = {
    "qwen3.5": """
        mtp.fc mtp.norm mtp.pre_fc_norm_embedding mtp.pre_fc_norm_hidden
        mtp.layers.0.input_layernorm mtp.layers.0.post_attention_layernorm
        mtp.layers.0.mlp.down_proj mtp.layers.0.mlp.gate_proj mtp.layers.0.mlp.up_proj
        mtp.layers.0.self_attn.k_norm mtp.layers.0.self_attn.k_proj mtp.layers.0.self_attn.o_proj
        mtp.layers.0.self_attn.q_norm mtp.layers.0.self_attn.q_proj mtp.layers.0.self_attn.v_proj
    """,
    "deepseek-v3": """
        model.layers.3.eh_proj model.layers.3.enorm model.layers.3.hnorm model.layers.3.shared_head.norm
        model.layers.3.input_layernorm model.layers.3.post_attention_layernorm model.layers.3.mlp.gate
        model.layers.3.mlp.shared_experts.down_proj model.layers.3.mlp.shared_experts.gate_proj
        model.layers.3.mlp.shared_experts.up_proj model.layers.3.self_attn.kv_a_layernorm
        model.layers.3.self_attn.kv_a_proj_with_mqa model.layers.3.self_attn.kv_b_proj
        model.layers.3.self_attn.o_proj model.layers.3.self_attn.q_a_layernorm model.layers.3.self_attn.q_a_proj
        model.layers.3.self_attn.q_b_proj
    """,
}
"""Weights of published layers (Qwen3.5-4B; DeepSeek-V3, whose layer is its 61st), experts left out."""
NEW: dict[str, Any] = {"head": {"method": "mtp", "steps": 3}}


def target_of(folder: Path, name: str, *, layer: bool = True) -> TargetModel:
    if layer:
        with_mtp(name, folder)
    else:
        save(build(name), folder)
    return TargetModel(str(folder), "fp32", None, "cpu")


def begun(target: TargetModel, start: str | None = None) -> MtpHead:
    return mtp_head(start, target, torch.float32, seed=3)[0]


@pytest.mark.plain("deepseek-v3", "qwen3-next")
@pytest.mark.parametrize("name", MODELS)
def test_unrolled_steps_are_the_served_chain(name: str, tmp_path: Path) -> None:
    target = target_of(tmp_path, name)
    draft = load_draft("mtp", target.loaded)
    assert isinstance(draft, MtpDraft)
    assert_served_alike(begun(target), draft)


@pytest.mark.plain("glm4-moe", "qwen3.5")
@pytest.mark.parametrize("name", MODELS)
def test_the_layer_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    """Under the names of the checkpoint, with its shapes, bit for bit; and a folder of its own is read again."""
    target = target_of(tmp_path / "model", name)
    tensors = mtp_tensors(begun(target), torch.float32)
    prefix = "mtp." if name.startswith("qwen") else "model.layers.3."
    theirs = load_file(tmp_path / "model" / "model.safetensors")
    wanted = {key: value for key, value in theirs.items() if key.startswith(prefix)}
    assert tensors.keys() == wanted.keys()
    assert all(tensor.equal(wanted[key]) for key, tensor in tensors.items())
    write_mtp(tensors, target, tmp_path / "layer")
    draft = load_draft(tmp_path / "layer", target.loaded)
    assert isinstance(draft, MtpDraft)
    assert_served_alike(begun(target, str(tmp_path / "layer")), draft)


def test_experts_stay_in_two_tensors(tmp_path: Path) -> None:
    target = target_of(tmp_path, "qwen3.5-moe")
    draft = load_draft("mtp", target.loaded)
    assert isinstance(draft, MtpDraft)
    stack_experts(tmp_path / "model.safetensors")
    head = begun(target)
    assert_served_alike(head, draft)
    theirs = load_file(tmp_path / "model.safetensors")
    tensors = mtp_tensors(head, torch.float32)
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in tensors
    assert tensors.keys() == {key for key in theirs if key.startswith("mtp.")}
    assert all(tensor.equal(theirs[key]) for key, tensor in tensors.items())


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_transformers_own_mtp_model_computes_the_same(name: str, tmp_path: Path) -> None:
    """Of a copy of the model with the layer, every tensor is loaded, and states are equal behind the final norm."""
    layers: Any = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no MTP")
    target = target_of(tmp_path / "model", name)
    head = begun(target)
    write_merged(mtp_tensors(head, torch.float32), target, tmp_path / "merged")
    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    # transformers knows the layer by the number that it has in the published model.
    main._keys_to_ignore_on_load_unexpected = {r"model\.layers\.3\..*"}
    theirs = layers.MtpModel.from_pretrained(main).eval()
    ids_BT, positions_BT = token_ids(1, 14), torch.arange(14)[None]
    with torch.no_grad():
        states_BTE = main.model(ids_BT).last_hidden_state
        (ours_BTE,) = head.chains(ids_BT, states_BTE, positions_BT, None, 1)
        found_BTE = theirs.forward_layer(
            0, states_BTE, positions_BT, None, input_ids=torch.nn.functional.pad(ids_BT[:, 1:], (0, 1))
        )
        torch.testing.assert_close(ours_BTE, found_BTE, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.answer(ours_BTE), main.lm_head(found_BTE), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_are_those_of_published_layers(name: str, tmp_path: Path) -> None:
    target = target_of(tmp_path, name, layer=False)
    found = mtp_tensors(begun(target), torch.bfloat16)
    names = {
        key.removesuffix(".weight") for key in found if ".experts." not in key and key.endswith(".weight")
    }
    assert names == set(PUBLISHED[name].split())
    biases = {key: tensor.dtype for key, tensor in found.items() if key.endswith("e_score_correction_bias")}
    assert biases == (
        {"model.layers.3.mlp.gate.e_score_correction_bias": torch.float32} if name == "deepseek-v3" else {}
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that began with random weights and has reached its end, with a copy of the model."""
    run = make_draft(tmp_path_factory.mktemp("whole") / "run", model="qwen3.5", **NEW)
    train(run, merge=True)
    return run


def test_resuming_equals_not_stopping(whole: Path, tmp_path: Path) -> None:
    again = copy_until(whole, 2, tmp_path / "again")
    train(again, resume=True)
    assert_same(state(checkpoints(again)[-1]), state(checkpoints(whole)[-1]))
    assert losses(again) == {step: loss for step, loss in losses(whole).items() if step > 2}
    files = [run.parent / "out" / "model" / "model.safetensors" for run in (again, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_two_processes_take_one_processes_steps(tmp_path: Path) -> None:
    """Experts among the sharded parameters; the layer's file is gathered."""
    model: dict[str, Any] = {"model": "glm4-moe", "tokens": 2 * 128}
    one = make_draft(tmp_path / "one", **model, **NEW)
    two = make_draft(tmp_path / "two", **model, **NEW, layout={"dp_shard": 2}, micro_batches=1)
    train(one)
    for code, told in run_processes(two, world=2):
        assert code == 0, told
    assert [*losses(two).values()] == pytest.approx([*losses(one).values()], rel=2e-4)
    files = [load_file(run.parent / "out" / "model" / "model.safetensors") for run in (one, two)]
    assert files[0].keys() == files[1].keys()
    assert all(tensor.shape == files[1][name].shape for name, tensor in files[0].items())


def test_a_new_layer_learns_and_is_reported(whole: Path) -> None:
    assert losses(whole)[6] < losses(whole)[1]
    report = json.loads((whole.parent / "out" / "model" / "acceptance.json").read_text())
    assert [one["position"] for one in report["positions"]] == [1, 2, 3]
    assert report["served"] == [], "nothing is served where no engine is handed in"


@pytest.mark.plain("qwen3.5")
@pytest.mark.parametrize("name", ["qwen3.5", "deepseek-v3"])
def test_a_models_own_layer_is_trained_further(name: str, tmp_path: Path) -> None:
    """And stands in the place of the old one in a copy of the model, which transformers and the server read."""
    run = make_draft(tmp_path / "run", model=name, tokens=2 * 128, **NEW)
    folder = tmp_path / "run" / "target"
    shutil.rmtree(folder)
    with_mtp(name, folder)
    outcome = train(run, merge=True)
    assert outcome.model is not None
    assert outcome.merged is not None
    old, new = (load_file(path / "model.safetensors") for path in (folder, outcome.model))
    assert new.keys() <= old.keys()
    assert not any(tensor.equal(old[key]) for key, tensor in new.items() if "fc" in key or "eh_proj" in key)
    merged = load_decoder(outcome.merged)
    own, apart = load_draft("mtp", merged), load_draft(outcome.model, load_decoder(folder))
    for key, tensor in own.state_dict().items():
        assert tensor.equal(apart.state_dict()[key]), key
    index = json.loads((outcome.merged / "model.safetensors.index.json").read_text())["weight_map"]
    held = [key for file in set(index.values()) for key in load_file(outcome.merged / file)]
    assert sorted(held) == sorted(index), "no tensor twice, and none that the index does not name"
    copies = {f"model.layers.3.{key}.weight" for key in ("embed_tokens", "shared_head.head")}
    assert index.keys() - old.keys() == (copies if name == "deepseek-v3" else set())
    described = json.loads((outcome.merged / "config.json").read_text())
    assert described["mtp_num_hidden_layers" if name == "qwen3.5" else "num_nextn_predict_layers"] == 1
    ids_BT = token_ids(1, 12)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(outcome.merged, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged.logits(ids_BT), theirs(ids_BT).logits, rtol=1e-3, atol=1e-3)


def test_a_layer_of_another_model_is_refused(whole: Path, tmp_path: Path) -> None:
    layer = whole.parent / "out" / "model"
    for name, changes, found in (
        ("qwen3.5", {"vocab_size": 96}, "vocabulary: 128"),
        ("qwen3.5", {"rms_norm_eps": 1e-3}, "eps: 1e-06"),
        ("glm4-moe", {}, "architecture: Qwen3_5ForCausalLM"),
    ):
        save(build(name, **changes), tmp_path / found[:4])
        with pytest.raises(ModelError, match=found):
            load_draft(layer, load_decoder(tmp_path / found[:4]))


def test_a_start_of_another_kind_is_refused(whole: Path, tmp_path: Path) -> None:
    layer = str(whole.parent / "out" / "model")
    save(build("qwen3.5"), tmp_path / "target")
    target = TargetModel(str(tmp_path / "target"), "fp32", None, "cpu")
    drafts.write_head(tmp_path / "target", tmp_path / "head")
    with pytest.raises(RunError, match="is not an MTP layer"):
        begun(target, str(tmp_path / "head"))
    with pytest.raises(ModelError, match="has no MTP layer"):
        begun(target, str(tmp_path / "target"))
    run = make_draft(tmp_path / "run", model="qwen3.5", head={"start": layer})
    with pytest.raises(RunError, match="is not an EAGLE-3 head"):
        train(run)


def test_a_run_of_another_method_is_not_continued(whole: Path, tmp_path: Path) -> None:
    again = copy_until(whole, 2, tmp_path / "again")
    with pytest.raises(CheckpointError, match=r"head\.method"):
        train(again, resume=True, settings={"head.method": "eagle3"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head": {"method": "eagle3"}}, "puts an MTP layer into a copy"),
        ({"head": {"method": "mtp", "vocabulary": 9}}, "is for heads of EAGLE-3"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TorchwrightError, match=words):
        train(make_draft(tmp_path / "run", model="qwen3.5", **changes), merge=True)
    assert not (tmp_path / "run" / "out").exists()
