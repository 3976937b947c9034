"""The transformers back end beside transformers' own `generate`: eight prompts at once, in bfloat16.

    python -m benchmarks.llm.transformers_backend [--rounds 5] [--tokens 64] [--prompt 128] [--shape NAME …]

Random weights of published shapes, cut to a few layers, greedy answers of a fixed length. Both take turns in one
process on the same threads; transformers runs its own attention (sdpa) and its own cache. Printed are medians of wall
time, and the ratio within rounds; `w8a8` is our linear layers rounded to 8 bits. A shape that has a native family shows
what the back end costs beside it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.harness import run
from benchmarks.harness.turns import ratio, timed
from torchwright.models.decoder.families import FAMILIES
from torchwright.models.decoder.load import load_decoder
from torchwright.models.decoder.transformers_backend.load import load_on_transformers

ROWS = 8
# fmt: off
SHAPES: dict[str, Callable[[], Any]] = {
    # the layers of Command R7B, four of 32
    "command-r7b": lambda: transformers.Cohere2Config(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000,
    ),
    # openai/gpt-oss-20b's layers with a quarter of the experts, two of 24
    "gpt-oss": lambda: transformers.GptOssConfig(
        num_hidden_layers=2, num_local_experts=8, vocab_size=32000,
    ),
    # Llama-3.2-1B, which has a native family
    "llama-1b": lambda: transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, tie_word_embeddings=True,
    ),
    # EleutherAI/pythia-1b, four of 16 layers
    "pythia-1b": lambda: transformers.GPTNeoXConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=8, vocab_size=50304,
    ),
}
# fmt: on
HEAD = (
    "shape",
    "transformers, s",
    "bf16, s",
    "ratio",
    "w8a8, s",
    "ratio",
    "native bf16, s",
    "native w8a8, s",
)


def main() -> int:
    options = run.options(__doc__, rounds=5, tokens=64, prompt=128, shape=tuple(SHAPES))
    rows = run.Rows(options.json, HEAD)
    for name in options.shape:
        with tempfile.TemporaryDirectory() as folder:
            row = {"shape": name, **measured(Path(folder), SHAPES[name](), options)}
        cells = [name]
        for key in ("transformers", "bf16", "w8a8"):
            cells.append(f"{median(row[key]):.2f}")
            cells += [f"{ratio(row['transformers'], row[key]):.2f}x"] if key != "transformers" else []
        for key in ("native bf16", "native w8a8"):
            cells.append(f"{median(row[key]):.2f}" if key in row else "")
        rows.add(row, cells)
    return 0


def measured(folder: Path, config: Any, options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    ids = torch.randint(5, config.vocab_size, (ROWS, options.prompt))
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    length = {"min_new_tokens": options.tokens, "max_new_tokens": options.tokens}

    def own() -> Any:
        with torch.inference_mode():
            return theirs.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length
            )

    contenders: dict[str, Callable[[], Any]] = {"transformers": own}
    for name, scheme in (("bf16", None), ("w8a8", "w8a8")):
        loaded: Any = load_on_transformers(folder, torch.bfloat16, quantize=scheme)
        run.say(f"{name}: {loaded.notices[0]}")
        ours = loaded.model
        contenders[name] = lambda ours=ours: ours.generate(
            ids.tolist(), max_new_tokens=options.tokens, stop=[]
        )
    if type(theirs).__name__ in FAMILIES:
        for name, scheme in (("native bf16", None), ("native w8a8", "w8a8")):
            native = load_decoder(folder, torch.bfloat16, scheme)
            contenders[name] = lambda ours=native: ours.generate(
                ids.tolist(), max_new_tokens=options.tokens, stop=[]
            )
    for contender in contenders.values():
        contender()
    return timed(contenders, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
