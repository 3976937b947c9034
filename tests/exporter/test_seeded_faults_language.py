"""Seeded faults in GGUF files and folders of safetensors: the weight or setting that is another is named."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from export_faults import Fault, Made, every, made_or_skipped, named
from safetensors.torch import load_file, save_file

from torchwright.exporter.subject import Subject, make_subject
from torchwright.exporter.targets.gguf import MODEL
from torchwright.exporter.targets.gguf_file import stored
from torchwright.exporter.targets.safetensors_folder import WEIGHTS
from torchwright.exporter.verification.worker import furthest_row
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.folder import read_config
from torchwright.workloads.detect import from_target

BUNDLED = Path(__file__).parents[2] / "src/torchwright/workloads/bundled"
UP, NORM = "model.layers.1.mlp.up_proj", "model.layers.1.input_layernorm"
WIDTH = 128
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A language model of two layers of 128 with the bundled one's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    shutil.copytree(BUNDLED, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "head_dim": 64}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config: Any = read_config(BUNDLED) | shape
    model = LlamaForCausalLM(LlamaConfig(**config))
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.bfloat16().save_pretrained(folder)
    return make_subject(from_target(str(folder)))


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchwright.core.paths.cache_folder", lambda: folder)
        yield


def other(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, 0.5)


def test_a_row_that_is_off_is_seen_among_many() -> None:
    wanted = torch.randn(100, 8)
    found = wanted.clone()
    found[17] *= -1
    assert furthest_row(wanted, wanted) == 0
    assert furthest_row(wanted, found) == pytest.approx(2)
    assert furthest_row(torch.zeros(2, 3), torch.ones(2, 3)) == pytest.approx(3**0.5)
    assert furthest_row(wanted, wanted[:50]) == float("inf")
    assert furthest_row(wanted, torch.full_like(wanted, float("nan"))) == float("inf")


# -------------------------------------------------------------------------------------------------- safetensors


def in_folder(name: str, change: Change) -> Fault:
    def fault(folder: Path, subject: Subject) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors[name] = change(tensors[name])
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return fault


def another_function(folder: Path, subject: Subject) -> None:
    config = read_config(folder)
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))


def first_row(change: Change) -> Change:
    return lambda tensor: torch.cat([change(tensor[:1]), tensor[1:]])


SAFETENSORS: Mapping[str, Mapping[str, tuple[Fault, str]]] = {
    "bf16": {
        "flipped": (in_folder(f"{UP}.weight", first_row(torch.neg)), UP),
        "stale": (in_folder(f"{NORM}.weight", other), NORM),
        "replaced": (another_function, "its settings"),
    },
    "w8a8": {
        "flipped": (in_folder(f"{UP}.weight", first_row(torch.neg)), UP),
        "halved": (in_folder(f"{UP}.weight_scale", lambda scale: scale / 2), UP),
        "stale": (in_folder(f"{NORM}.weight", other), NORM),
    },
    "w4a16": {
        "flipped": (in_folder(f"{UP}.weight_packed", first_row(torch.bitwise_not)), UP),
        "halved": (in_folder(f"{UP}.weight_scale", lambda scale: scale / 2), UP),
        "stale": (in_folder(f"{NORM}.weight", other), NORM),
    },
}


# --------------------------------------------------------------------------------------------------------- GGUF


def in_gguf(name: str, kind: str, change: Change) -> Fault:
    """Change a tensor of the file, which is found by its bytes."""

    def fault(folder: Path, subject: Subject) -> None:
        assert subject.folder is not None
        tensors = Checkpoint(subject.folder, read_config(subject.folder)).tensors(torch.float32)
        (own,) = [tensor for key, tensor in tensors if key == f"{name}.weight"]
        before = torch.frombuffer(bytearray(stored(own, kind).content), dtype=torch.uint8)
        file, after = folder / MODEL, change(before.clone())
        content = file.read_bytes()
        assert content.count(before.numpy().tobytes()) == 1
        file.write_bytes(content.replace(before.numpy().tobytes(), after.numpy().tobytes()))

    return fault


def scales_halved(block: int) -> Change:
    """Of blocks of so many bytes, which begin with a scale in half precision."""

    def change(content: torch.Tensor) -> torch.Tensor:
        blocks = content.view(-1, block)
        blocks[:, :2] = (blocks[:, :2].contiguous().view(torch.half) / 2).view(torch.uint8)
        return content

    return change


def signs(bits: int, width: int) -> Change:
    """Turn the sign of the first row's numbers; of floats that is their highest bit."""

    def change(content: torch.Tensor) -> torch.Tensor:
        content[: width * bits // 8].view(-1, bits // 8)[:, -1] ^= 0x80
        return content

    return change


def halves(content: torch.Tensor) -> torch.Tensor:
    return torch.full([len(content) // 4], 0.5).view(torch.uint8)


def another_base(folder: Path, subject: Subject) -> None:
    """The base of the rotary embeddings: the format has no operators that could be exchanged."""
    content, key = (folder / MODEL).read_bytes(), b"llama.rope.freq_base"
    at = content.index(key) + len(key) + 4
    (base,) = struct.unpack_from("<f", content, at)
    (folder / MODEL).write_bytes(content[:at] + struct.pack("<f", base / 100) + content[at + 4 :])


GGUF: Mapping[str, Mapping[str, tuple[Fault, str]]] = {
    "bf16": {
        "flipped": (in_gguf(UP, "BF16", signs(16, WIDTH)), UP),
        "stale": (in_gguf(NORM, "F32", halves), NORM),
        "replaced": (another_base, "its settings"),
    },
    "q8_0": {
        "halved": (in_gguf(UP, "Q8_0", scales_halved(34)), UP),
        "stale": (in_gguf(NORM, "F32", halves), NORM),
    },
    "q4_0": {
        "flipped": (in_gguf(UP, "Q4_0", lambda content: content ^ 0xFF), UP),
        "halved": (in_gguf(UP, "Q4_0", scales_halved(18)), UP),
    },
}


# -------------------------------------------------------------------------------------------------------- both

EVERY = every({"safetensors": SAFETENSORS, "gguf": GGUF})


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tiny: Subject, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_or_skipped(*request.param, tmp_path_factory.mktemp("made") / "made", tiny)


@pytest.mark.slow  # the verifier's search takes 3 s for each
@pytest.mark.parametrize(("made", "spoil", "wanted"), EVERY, indirect=["made"])
def test_a_fault_is_named(made: Made, spoil: Fault, wanted: str, tmp_path: Path) -> None:
    found = made.parting(spoil, tmp_path / "spoiled")
    assert named([found]) == wanted
    assert spoil is not another_function or "hidden_act 'gelu', was 'silu'" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "precision"), [("safetensors", "bf16"), ("safetensors", "w4a16"), ("gguf", "q4_0")]
)
def test_what_is_sound_is_not_named(to: str, precision: str, tiny: Subject, tmp_path: Path) -> None:
    made = made_or_skipped(to, precision, tmp_path / "made", tiny)
    assert made.parting(lambda folder, subject: None, tmp_path / "copy") == ""
