"""Adapters for single rows: the merged model's answers, the same bits in any company, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import build, save

from lora_files import ATTENTION, LINEAR, write_adapter
from torchwright.core.errors import ModelError
from torchwright.hub.adapter import CONFIG, PREFIX, WEIGHTS, A, AdapterSettings, B
from torchwright.models.decoder import LoadedDecoder, load_decoder
from torchwright.models.decoder.adapters import read_adapter
from torchwright.models.decoder.batch import with_adapters
from torchwright.models.decoder.low_rank import Adapter
from torchwright.optimization.open_model import open_model
from torchwright.workloads.language import BUNDLED

FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
IDS = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(1))


def read(loaded: LoadedDecoder, folder: Path) -> Adapter:
    return read_adapter(folder, loaded.decoder, loaded.folder)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(base: Path) -> LoadedDecoder:
    return load_decoder(base, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "targets", "options"),
    [
        ("llama", LINEAR, {"r": 3, "use_rslora": True}),
        ("llama", ("q_proj", "v_proj"), {"r": 8, "alpha_pattern": {"0.self_attn.q_proj": 3.0}}),
        ("phi3", FUSED, {}),
        ("glm", (*ATTENTION, "gate_up_proj", "down_proj"), {}),  # the rows of q and k change their order
        ("qwen3.5", LINEAR, {}),  # a gate in q's rows; other layers are recurrent
        ("gemma2", LINEAR, {}),
        ("gpt-oss", ATTENTION, {}),
    ],
)
def test_logits_are_the_merged_models(
    name: str, targets: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    base = save(build(name), tmp_path / "base")
    folder = write_adapter(base, tmp_path / "adapter", targets=targets, **options)
    exact = load_decoder(base, adapter=folder).logits(IDS)
    plain = load_decoder(base)
    assert distance(plain.logits(IDS), exact) > 0.1
    assert distance(plain.logits(IDS, adapter=read(plain, folder)), exact) < 1e-5
    narrow = load_decoder(base, torch.bfloat16)
    merged = load_decoder(base, torch.bfloat16, adapter=folder).logits(IDS)
    found = narrow.logits(IDS, adapter=read(narrow, folder))
    assert distance(found, exact) < 1.5 * distance(merged, exact) + 0.01


@pytest.mark.slow
def test_texts_of_the_bundled_model_are_the_merged_models(tmp_path: Path) -> None:
    """Within 2e-2, and the same token first in at least 99 of 100 places."""
    folder = write_adapter(BUNDLED, tmp_path, r=16, std=0.02)
    plain = load_decoder(BUNDLED, torch.bfloat16)
    merged = load_decoder(BUNDLED, torch.bfloat16, adapter=folder)
    adapter, same, places = read(plain, folder), 0, 0
    for prompt in ("Once upon a time", "The dog ran to", "Tom and Lily", "One day"):
        ids = torch.tensor([merged.encode(prompt + merged.generate(prompt, max_new_tokens=200, stop=[]))])
        wanted, found = merged.logits(ids), plain.logits(ids, adapter=adapter)
        assert distance(plain.logits(ids), wanted) > 0.05
        assert distance(found, wanted) < 2e-2
        same += int((found.argmax(-1) == wanted.argmax(-1)).sum())
        places += ids.numel()
    assert same >= 0.99 * places


@pytest.mark.parametrize("quantize", ["w8a8", "w4a8", "w4a16"])
def test_a_quantized_model_takes_adapters(quantize: str, base: Path, tmp_path: Path) -> None:
    folder = write_adapter(base, tmp_path)
    loaded = load_decoder(base, torch.bfloat16, quantize)
    exact, plain = load_decoder(base, adapter=folder).logits(IDS), load_decoder(base).logits(IDS)
    found = loaded.logits(IDS, adapter=read(loaded, folder))
    assert distance(found, exact) < 1.5 * distance(loaded.logits(IDS), plain) + 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_its_own_beside_fifteen_other_adapters(
    dtype: torch.dtype, base: Path, tmp_path: Path
) -> None:
    """In one plan, in the layers' calls, and in a prompt cut in two; bit for bit on the kernels."""
    loaded = load_decoder(base, dtype)
    adapters = [read(loaded, write_adapter(base, tmp_path / str(n), seed=n, r=1 + n)) for n in range(15)]
    owners: list[Adapter | None] = [None, *adapters]
    prompts = torch.randint(3, 128, (16, 11), generator=torch.Generator().manual_seed(2)).tolist()

    def steps(company: list[int], cut: int) -> dict[int, torch.Tensor]:
        cache = loaded.new_cache([11] * len(company))
        sequences = [cache.sequence(11) for _ in company]
        found = {row: torch.empty(0) for row in company}
        for start, stop in ((0, cut), (cut, 10), (10, 11)):
            pieces = [(s, prompts[row][start:stop]) for s, row in zip(sequences, company, strict=True)]
            batch = with_adapters(cache.append(pieces), [(owners[row], stop - start) for row in company])
            with torch.inference_mode():
                logits = loaded.decoder.answer(batch, cache, batch.last_rows_B).values_NV
            for row, logits_V in zip(company, logits, strict=True):
                found[row] = torch.cat([found[row], logits_V])
        return found

    together = steps([*range(16)], 4)
    for row in range(16):
        alone = steps([row], 4)[row]
        assert torch.equal(together[row], alone) or dtype == torch.float32
        torch.testing.assert_close(together[row], alone, atol=1e-4, rtol=1e-4)
    whole = steps([*range(15, -1, -1)], 9)  # more rows than a plan takes
    vocabulary = loaded.config.vocabulary
    for row in range(16):
        torch.testing.assert_close(
            whole[row][-vocabulary:], together[row][-vocabulary:], atol=1e-4, rtol=1e-4
        )
        assert torch.equal(whole[row][-vocabulary:], together[row][-vocabulary:]) or dtype == torch.float32


def test_the_plan_runs_with_adapters_and_without(loaded: LoadedDecoder, base: Path, tmp_path: Path) -> None:
    """Without one the step is the operator that it was; with one it is the same operator."""
    adapter = read(loaded, write_adapter(base, tmp_path))
    for owner in (None, adapter):
        cache = loaded.new_cache([40])
        sequence = cache.sequence(40)
        with torch.inference_mode(), torch.profiler.profile() as profiled:
            for token in (5, 6):
                batch = with_adapters(cache.append([(sequence, [token])]), [(owner, 1)])
                loaded.decoder.answer(batch, cache, batch.last_rows_B)
        names = {event.key for event in profiled.key_averages()}
        assert "torchwright::decode_step" in names
        assert not any(name.startswith("torchwright::linear") for name in names)


def test_generate_takes_an_adapter(loaded: LoadedDecoder, base: Path, tmp_path: Path) -> None:
    folder = write_adapter(base, tmp_path, std=0.3)
    adapter, prompts = read(loaded, folder), [IDS[0].tolist(), IDS[1, :7].tolist()]
    both = loaded.generate(prompts, max_new_tokens=12, stop=[], adapter=adapter)
    assert both == [loaded.generate(ids, max_new_tokens=12, stop=[], adapter=adapter) for ids in prompts]
    assert both != loaded.generate(prompts, max_new_tokens=12, stop=[])


def test_the_digest_is_of_what_is_computed_with(loaded: LoadedDecoder, base: Path, tmp_path: Path) -> None:
    one = read(loaded, write_adapter(base, tmp_path / "one"))
    assert read(loaded, write_adapter(base, tmp_path / "two")).digest == one.digest
    others: list[dict[str, Any]] = [
        {"seed": 1},
        {"lora_alpha": 9.0},
        {"use_rslora": True},
        {"targets": ATTENTION},
    ]
    for n, changed in enumerate(others):
        assert read(loaded, write_adapter(base, tmp_path / f"other{n}", **changed)).digest != one.digest


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_names_within_a_multimodal_model_are_the_language_models(
    prefix: str, loaded: LoadedDecoder, base: Path, tmp_path: Path
) -> None:
    """peft names layers as transformers' class does, which is another than that of the decoder's files."""
    folder = write_adapter(base, tmp_path)
    digest = read(loaded, folder).digest
    tensors = {
        name.replace(f"{PREFIX}model.", f"{PREFIX}{prefix}"): tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    save_file(tensors, folder / WEIGHTS)
    assert read(loaded, folder).digest == digest
    vision = f"{PREFIX}model.visual.blocks.0.attn.qkv"
    save_file(
        tensors | {f"{vision}.{A}": torch.zeros(4, 64), f"{vision}.{B}": torch.zeros(192, 4)},
        folder / WEIGHTS,
    )
    with pytest.raises(ModelError, match=r"visual\.blocks\.0\.attn\.qkv"):
        read(loaded, folder)


def broken(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors of an adapter's file, or take them out."""
    found = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    save_file(found, folder / WEIGHTS)


NAME = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"{NAME}.{B}": None}, r"'model.layers.0.self_attn.q_proj'.*does not fit"),
        ({f"{NAME}.{A}": torch.zeros(4, 65)}, r"does not fit its weight.*A \[r, 64\]"),
        ({f"{NAME}.{B}": torch.zeros(64, 5)}, r"does not fit"),
        ({f"{NAME}.{A}": torch.zeros(4, 64, dtype=torch.int32)}, r"does not fit.*floating point"),
        ({f"{NAME}.{A}": torch.full((4, 64), torch.nan)}, r"not finite"),
        ({f"{NAME}.{B}": torch.full((64, 4), torch.inf)}, r"not finite"),
        (
            {f"{PREFIX}lm_head.{A}": torch.zeros(4, 64), f"{PREFIX}lm_head.{B}": torch.zeros(128, 4)},
            r"lm_head",
        ),
        ({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(4, 128)}, r"not read here"),
        ({f"{PREFIX}lm_head.weight": torch.zeros(128, 64)}, r"not read here"),
        ({f"{PREFIX}model.layers.9.mlp.up_proj.{A}": torch.zeros(4, 64)}, r"model.layers.9.mlp.up_proj"),
        ({"layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)}, r"not read here"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(
    tensors: dict[str, torch.Tensor | None], said: str, loaded: LoadedDecoder, base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(base, tmp_path)
    broken(folder, **tensors)
    with pytest.raises(ModelError, match=said):
        read(loaded, folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, r"DoRA.*--adapter DIR`, without a name, merges"),
        ({"arrow_config": {"top_k": 3}}, r"arrow_config"),
        ({"init_lora_weights": "pissa_niter_16"}, r"init_lora_weights pissa.*path_initial_model_for_weight"),
        ({"init_lora_weights": "LoftQ"}, r"other weights than the model's own"),
        ({"peft_type": "IA3"}, r"LORA"),
        ({"bias": "all"}, r"bias"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save"),
        ({"fan_in_fan_out": True}, r"fan_in_fan_out"),
        ({"alpha_pattern": {r"layers\.[01]\..*q_proj": 3.0}}, r"alpha_pattern.*regular expression"),
        ({"lora_alpha": "16"}, r"lora_alpha"),
        ({"lora_alpha": float("inf")}, r"adapter_config.json"),
    ],
)
def test_settings_that_mean_something_else_are_refused(
    settings: dict[str, Any], said: str, loaded: LoadedDecoder, base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(base, tmp_path)
    config = json.loads((folder / CONFIG).read_text()) | settings
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said):
        read(loaded, folder)


def test_the_first_name_of_a_pattern_counts_as_with_peft(base: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    pattern = {f"^{name}": 3.0, "0.self_attn.v_proj": 7.0, "q_proj": 5.0, "proj": 9.0}
    settings = AdapterSettings(write_adapter(base, tmp_path, lora_alpha=8.0, alpha_pattern=pattern))
    for module in (name, f"x.{name}", name.replace("0", "10"), name.replace("q_", "v_"), "model.norm"):
        fits = (alpha for key, alpha in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
        assert settings.scale(module, 2) == next(fits, 8.0) / 2, module


def test_damaged_and_missing_files_are_refused(loaded: LoadedDecoder, base: Path, tmp_path: Path) -> None:
    folder = write_adapter(base, tmp_path / "a")
    data = (folder / WEIGHTS).read_bytes()
    for wrong in (b"", data[:7], data[:-9], b"\xff" * 64):
        (folder / WEIGHTS).write_bytes(wrong)
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read"):
            read(loaded, folder)
    (folder / WEIGHTS).write_bytes(data)
    with pytest.raises(ModelError, match="more than"):
        read_adapter(folder, loaded.decoder, loaded.folder, most_bytes=100)
    save_file({}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="changes nothing"):
        read(loaded, folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        read(loaded, folder)
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        read(loaded, tmp_path)


def test_experts_take_no_adapters(tmp_path: Path) -> None:
    base = save(build("qwen3-moe"), tmp_path / "base")
    loaded = load_decoder(base, torch.bfloat16)
    folder = write_adapter(base, tmp_path / "a", targets=(*ATTENTION, "down_proj"))
    with pytest.raises(ModelError, match=r"experts.*--adapter DIR`, without a name"):
        read(loaded, folder)
    opened = open_model(str(base), adapter=str(folder), merge=False)
    assert isinstance(opened.model, LoadedDecoder)
    assert opened.adapter is None
    assert "is merged into the weights" in opened.notices[0]
    merged = load_decoder(base, torch.bfloat16, adapter=folder)
    assert torch.equal(opened.model.logits(IDS), merged.logits(IDS))
    folder = write_adapter(base, tmp_path / "b", targets=ATTENTION)
    exact = load_decoder(base, adapter=folder).logits(IDS)
    plain = load_decoder(base)
    assert distance(plain.logits(IDS, adapter=read(plain, folder)), exact) < 1e-5
