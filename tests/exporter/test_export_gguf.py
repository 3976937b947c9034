"""GGUF files: blocks as others read them, the bundled model through a file and back, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import small

from torchwright.core.errors import ModelError, RefusedTechnique
from torchwright.exporter.subject import Subject, make_subject
from torchwright.exporter.targets.gguf import MODEL, Gguf, _by_reader, _geometry, _special, _turned
from torchwright.exporter.targets.gguf_file import stored
from torchwright.exporter.verification.reference import EXAMPLE, calls_of
from torchwright.hub.chat_template import ChatTemplate
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.gguf.folder import opened
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.detect import from_target
from torchwright.workloads.module import ModuleWorkload

BUNDLED = Path(__file__).parents[2] / "src/torchwright/workloads/bundled"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchwright.core.paths.cache_folder", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def bundled() -> Subject:
    return make_subject(from_target(None))


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4)])
def test_blocks_are_the_nearest_that_others_read(kind: str, bits: int) -> None:
    quants = pytest.importorskip("gguf.quants", reason="gguf is not installed")
    constants = pytest.importorskip("gguf.constants")
    rows = torch.randn(8, 96) * 10 ** torch.randint(-3, 4, (8, 1))
    rows[0, :32] = 0
    content = torch.frombuffer(bytearray(stored(rows, kind).content), dtype=torch.uint8).view(8, -1)
    read = torch.from_numpy(quants.dequantize(content.numpy(), constants.GGMLQuantizationType[kind])).double()
    blocks, wrong = rows.double().view(-1, 32), (read - rows.double()).view(-1, 32).abs()
    furthest = blocks.abs().amax(1, keepdim=True)
    # The scale is a half-precision number. Of four bits the far end opposite to the furthest number is cut: one step.
    step = furthest / (127 if bits == 8 else 8)
    assert bool((wrong <= step * (0.51 if bits == 8 else 1.01) + furthest * 2e-3).all())
    assert bool((read[0, :32] == 0).all())


@pytest.mark.slow  # the contract writes and reads a smaller model
@pytest.mark.parametrize(("precision", "allowed"), [("bf16", 0.0), ("q8_0", 0.01), ("q4_0", 0.15)])
def test_the_bundled_model_comes_back(
    precision: str, allowed: float, bundled: Subject, tmp_path: Path
) -> None:
    written = Gguf.write(bundled, precision, tmp_path)
    assert sum(written.operators.values()) == 56
    original = Checkpoint(BUNDLED, json.loads((BUNDLED / "config.json").read_text()))
    wanted = dict(original.tensors(torch.float32))
    found = Gguf.weights(tmp_path)
    assert found.keys() == wanted.keys() - {"lm_head.weight"}
    for name, tensor in found.items():
        assert relative_error([wanted[name]], [tensor]).value <= allowed, name
    call = next(call for call in calls_of(bundled) if call.name == EXAMPLE)
    outputs = _by_reader(tmp_path / MODEL, 1)(call.tensors)
    assert relative_error(call.outputs, outputs).value <= max(1e-5, Gguf.tolerances[precision])


def test_chat_templates_are_kept_wherever_they_lie(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    sources = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}", "short": "s"}
    (folder / "chat_template.jinja").write_text(sources["default"])
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "short"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(sources[name])
    Gguf.write(make_subject(from_target(str(folder))), "q8_0", tmp_path)
    assert ChatTemplate(opened(tmp_path / MODEL)).sources == sources


def test_the_tokenizer_cuts_as_the_models_own(bundled: Subject, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    Gguf.write(bundled, "q8_0", tmp_path)
    ours = Tokenizer.from_file(str(opened(tmp_path / MODEL) / "tokenizer.json"))
    theirs = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    for said in ("Hello, it's 1234 words\n\n  and\tmore", "naïve 漢字 🙂 <|begin|>", ""):
        assert ours.encode(said).ids == theirs.encode(said).ids, said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "family gpt2"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "scaled rotary"),
    ],
)
def test_what_the_format_has_not_is_refused(change: dict[str, Any], said: str) -> None:
    config = json.loads((BUNDLED / "config.json").read_text())
    with pytest.raises(RefusedTechnique, match=said):
        _geometry(config | change, BUNDLED / "config.json")


def test_a_module_is_no_language_model(tmp_path: Path) -> None:
    with pytest.raises(RefusedTechnique, match="comes from no model folder"):
        Gguf.write(make_subject(ModuleWorkload(*small())), "bf16", tmp_path)
    assert not any(tmp_path.iterdir())


def test_heads_that_do_not_divide_the_rows_are_refused() -> None:
    config = {"model_type": "llama", "num_attention_heads": 32}
    with pytest.raises(ModelError, match=r"has 32 rows, which 32 heads of config.json do not divide"):
        _turned("model.layers.0.self_attn.q_proj.weight", torch.zeros(32, 16), config)


@pytest.mark.parametrize("id", [-1, 2**32, None])
def test_an_id_that_no_token_has_is_left_out(tmp_path: Path, id: int | None) -> None:
    """A negative id stands for none in some configs; GGUF keeps 32 bits without a sign."""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    found = _special(tmp_path, {"bos_token_id": 3, "eos_token_id": id}, [3])
    assert found["tokenizer.ggml.bos_token_id"] == 3
    assert "tokenizer.ggml.eos_token_id" not in found
