"""A trained model of 104 million parameters for `benchmarks.llm.drafts`, grown from the bundled one within an hour.

    python -m benchmarks.llm.drafts --folder SMALL --tokens 1600000 --characters 6000000 --steps 4 --vocabulary 4096
    python -m benchmarks.llm.grown FOLDER [--layers 16] [--tokens 3000000] --head SMALL/run/model
    python -m benchmarks.llm.drafts --model FOLDER/run/model --folder FOLDER/head --start FOLDER/start --steps 4
        --quantize-draft w8a8 --batches 1 2 4 8 16

Two cores cannot train a model of that size from the start in that time. The bundled model is made twice as wide and
gets more layers in a way that keeps what it computes (Net2Net, Chen et al., 2015; bert2BERT, Chen et al., 2021):
every feature is there twice, the weights of its two copies are split at random, and new layers add nothing at first.
Then `torchwright train` goes on with the standard library's modules and those of installed packages, so that the new
weights learn. Both commands continue where they were stopped: run them again.

--head is the folder of an EAGLE-3 head for the bundled model, which takes a fifth of the time to train. It is grown,
too, into FOLDER/start: a head as wide as before that reads the wide features. `torchwright train --draft eagle3`
trains it further for the trained model (`--set head.start=FOLDER/start`), as the third command does.

The script prints each model's perplexity on the bundled held-out text. It also prints the largest difference of its
logits from the bundled model's, relative to the largest logit.
"""

from __future__ import annotations

import json
import math
import shutil
import site
import sys
import sysconfig
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import run
from benchmarks.llm.modules import write_rows
from torchwright.models.decoder import load_decoder

SPLIT = 0.1
"""Deviation of a copy's share of a weight around one half: equal shares would stay equal in training."""
CONTEXT, BATCH = 256, 4096
JUDGED = 16
"""Windows of the held-out text."""


def main() -> int:
    options = run.options(
        __doc__, "folder", layers=16, tokens=3_000_000, characters=30_000_000, seed=0, head=str
    )
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    small, large, after = run.BUNDLED, folder / "grown", folder / "run" / "model"
    if not large.is_dir():
        grow(small, large, layers=options.layers, seed=options.seed)
    if options.head and not (folder / "start").is_dir():
        grow_head(Path(options.head), small, folder / "start", layers=options.layers)
    if not after.is_dir():
        train(large, folder, options.tokens, options.characters)
    rows = run.Rows(options.json, ("model", "parameters", "perplexity", "difference"))
    for path in (small, large, after):
        parameters, perplexity, logits = judged(path)
        difference = (logits - judged(small)[2]).abs().max() / logits.abs().max()
        row = {"model": path.name, "parameters": parameters, "perplexity": perplexity}
        rows.add(row, (path.name, f"{parameters:,}", f"{perplexity:.3f}", f"{float(difference):.2e}"))
    return 0


def grow(small: Path, large: Path, *, layers: int, seed: int = 0) -> None:
    """Write a Llama folder twice as wide and `layers` deep that computes what the one in `small` does, in float32."""
    config = json.loads((small / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(small / "model.safetensors").items()}
    old, random = config["num_hidden_layers"], torch.Generator().manual_seed(seed)
    places = {place * layers // old: place for place in range(old)}
    found = {"model.embed_tokens.weight": _twice(tensors["model.embed_tokens.weight"], 1)}
    # Logits are sums over both copies.
    found["model.norm.weight"] = _twice(tensors["model.norm.weight"], 0) / 2
    if "lm_head.weight" in tensors:
        found["lm_head.weight"] = _twice(tensors["lm_head.weight"], 1)
    source = 0
    for layer in range(layers):
        source = places.get(layer, source)
        prefix = f"model.layers.{source}."
        for name in [name for name in tensors if name.startswith(prefix)]:
            rest = name.removeprefix(prefix)
            tensor = _twice(tensors[name], 0)
            if tensor.dim() == 2:
                tensor = _split(tensor, random)
                if layer not in places and rest.endswith(("o_proj.weight", "down_proj.weight")):
                    tensor = torch.zeros_like(tensor)
            found[f"model.layers.{layer}.{rest}"] = tensor
    wide = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config |= {name: 2 * config[name] for name in wide} | {"num_hidden_layers": layers, "dtype": "float32"}
    large.mkdir(parents=True)
    for file in small.iterdir():
        if file.suffix == ".json" and file.name != "config.json":
            shutil.copy2(file, large)
    save_file(found, large / "model.safetensors", metadata={"format": "pt"})
    (large / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def grow_head(head: Path, small: Path, large: Path, *, layers: int) -> None:
    """Write the folder of a head that computes for the grown model what the one in `head` does for the bundled one."""
    config = json.loads((head / "config.json").read_text())
    old = json.loads((small / "config.json").read_text())
    found = load_file(head / "model.safetensors")
    tensors = {name: tensor.float() for name, tensor in found.items() if tensor.is_floating_point()}
    parts = tensors["fc.weight"].chunk(3, 1)
    tensors["fc.weight"] = torch.cat([_twice(part, 1) / 2 for part in parts], 1)
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = load_file(small / "model.safetensors")[
            "model.embed_tokens.weight"
        ].float()
    sections = config["eagle_config"]
    # The output of a layer is the next one's input, and the layers between them add nothing at first.
    sections["eagle_aux_hidden_state_layer_ids"] = [
        (place + 1) * layers // old["num_hidden_layers"] - 1
        for place in sections["eagle_aux_hidden_state_layer_ids"]
    ]
    config |= {"target_hidden_size": 2 * old["hidden_size"], "torch_dtype": "float32"}
    large.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in (found | tensors).items()}, large / "model.safetensors"
    )
    (large / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _twice(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([tensor, tensor], dim)


def _split(weight_OI: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Weights (O, 2 I) for an input that is there twice: each weight in two parts, chosen at random."""
    share_OI = 0.5 + SPLIT * torch.randn(weight_OI.shape, generator=random)
    return torch.cat([share_OI * weight_OI, (1 - share_OI) * weight_OI], 1)


def train(model: Path, folder: Path, tokens: int, characters: int) -> None:
    text = folder / "text.jsonl"
    if not text.is_file():
        write_rows(text, [sysconfig.get_path("stdlib"), *site.getsitepackages()], characters)
    fields = {
        "context": CONTEXT,
        "batch_tokens": BATCH,
        "micro_batches": 2,
        "tokens": tokens // BATCH * BATCH,
        "optimizer.lr": 3e-4,
    }
    sizes = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    begun = perf_counter()
    found = run.torchwright(
        "train", "--model", model, "--data", text, "-o", folder / "run", *sizes, "--quiet"
    )
    run.say(f"{found.stdout}{perf_counter() - begun:.0f} s")


@torch.inference_mode()
def judged(folder: Path) -> tuple[int, float, torch.Tensor]:
    """Parameters, the perplexity on held-out text, and the logits of a window."""
    loaded = load_decoder(folder, torch.float32)
    ids = loaded.encode((run.BUNDLED / "eval.txt").read_text("utf-8"))[: JUDGED * CONTEXT]
    ids_BT = torch.tensor(ids).view(JUDGED, CONTEXT)
    logits_BTV = loaded.logits(ids_BT)
    losses = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    return parameters, math.exp(losses.item()), logits_BTV[0]


if __name__ == "__main__":
    sys.exit(main())
