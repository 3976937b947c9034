"""What peft makes of the adapters that are written: it loads them, and computes and learns the same with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, losses, make_run
from safetensors.torch import load_file

from torchwright.hub.run_folder import ADAPTER
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.families import decoder_config
from torchwright.train.data.shards import Shards
from torchwright.train.model import Transformer, save_folder
from torchwright.train.model.lora import adapters, add_adapters, freeze, reset_adapters
from torchwright.train.model.lora_files import decoder_targets, save_adapters
from torchwright.train.run.config.read import read_run
from torchwright.train.run.config.schedule import plan_step
from torchwright.train.run.loop.train import train
from torchwright.train.run.runtime.corpus import windows_of

peft = pytest.importorskip("peft", reason="peft is not installed")
from transformers import AutoModelForCausalLM  # noqa: E402

PHI3 = {
    **CONFIG,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
"""Its files keep q, k and v in one tensor, gate and up in another."""


def written(folder: Path, config: dict[str, Any]) -> tuple[Transformer, DecoderConfig]:
    """A random model, written to `folder`."""
    shape = decoder_config(config, "the test")
    model = Transformer(shape)
    model.reset_parameters(0)
    source = folder.with_name("source")
    source.mkdir()

    (source / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    save_folder(model, shape, folder, source=source)
    return model, shape


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("config", [CONFIG, PHI3], ids=["llama", "phi3"])
def test_peft_loads_and_computes_the_same(tmp_path: Path, config: dict[str, Any], dora: bool) -> None:
    """Logits to 1e-4 of float32."""
    model, shape = written(tmp_path / "model", config)
    targets = decoder_targets(shape)
    freeze(model, torch.float32)
    names = [module for target in targets for module in target.modules]
    add_adapters(model, names, r=3, alpha=7.0, dropout=0.0, dora=dora)
    reset_adapters(model, 0)
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.B.normal_(std=0.3)
    settings = {
        "base_model_name_or_path": str(tmp_path / "model"),
        "r": 3,
        "lora_alpha": 7.0,
        "lora_dropout": 0.0,
        "use_dora": dora,
    }
    save_adapters(model, targets, tmp_path / ADAPTER, settings)
    ids = torch.arange(40)[None] % 128
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    plain = theirs(ids).logits
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / ADAPTER)
    with torch.no_grad():
        logits = theirs(ids).logits
        assert (logits - plain).abs().max() > 0.1
        torch.testing.assert_close(model(ids), logits, atol=1e-4, rtol=0)
    # And it writes the same names and shapes.
    held = peft.get_peft_model_state_dict(theirs)

    ours = load_file(tmp_path / ADAPTER / "adapter_model.safetensors")
    assert {name: value.shape for name, value in ours.items()} == {
        name: value.shape for name, value in held.items()
    }


def test_a_run_learns_what_a_loop_with_peft_learns(tmp_path: Path) -> None:
    """Losses of six steps from the same adapters, by AdamW as in torch, to 2e-5: float32 in another order."""
    written(tmp_path / "model", CONFIG)
    lora = {"r": 4, "alpha": 8.0}
    run = make_run(
        tmp_path,
        model={"folder": "model"},
        lora=lora,
        optimizer={"lr": 1e-2, "weight_decay": 0.0},
        clip=False,
    )
    start = make_run(tmp_path / "start", model={"folder": "../model"}, lora=lora, optimizer={"lr": 1e-30})
    train(run, live=False)
    train(start, live=False)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "start" / "out" / ADAPTER, is_trainable=True)
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = read_run(run)
    windows = windows_of(settings, Shards([tmp_path / "a.npy", tmp_path / "b.npy"], 128), 32, None, 0)
    optimizer = torch.optim.AdamW(learnt, betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for number in range(6):
        step = plan_step(settings, number)
        rows = windows.batch(step.first, step.rows)
        logits = model(rows.ids_BT).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.labels_BT.flatten())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * step.rate
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert list(losses(run).values()) == pytest.approx(found, rel=2e-5)
