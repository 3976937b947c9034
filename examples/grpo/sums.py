"""The task: sums of two numbers below a hundred. A reward is exact, and the words are characters."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse

CHARACTERS = "0123456789+="
END = len(CHARACTERS)
"""The end token's id."""
CONTEXT = 16
LONGEST_ANSWER = 4
"""Three digits and the end token."""
HELD_OUT = 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": END,
    "eos_token_id": END,
}

Sum = tuple[int, int]


def sums() -> tuple[list[Sum], list[Sum]]:
    """All of them, those to train on and those held out."""
    every = [(one, other) for one in range(100) for other in range(100)]
    random.Random(0).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def question(sum: Sum) -> str:
    return f"{sum[0]}+{sum[1]}="


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def reward(asked: Sum, answer: list[int]) -> float:
    """1 for the right digits and the end token behind them, else 0."""
    return float(answer == [*encode(str(asked[0] + asked[1])), END])


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json: a token for each character."""
    words = {character: id for id, character in enumerate(CHARACTERS)} | {"<end>": END}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<end>|."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_examples(file: Path, examples: list[Sum]) -> None:
    """Rows with a question and its answer, as `torchwright train` reads them."""
    rows = [{"prompt": question(sum), "completion": str(sum[0] + sum[1])} for sum in examples]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
