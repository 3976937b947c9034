"""The task: sums of four digits. A reward is exact, and the words are characters.

The examples for supervised training are a careless teacher's: four of five leave one of the digits out. No training on
them can tell which answers are right; the reward can.
"""

from __future__ import annotations

import itertools
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
"""Digits and the end token; no right answer needs them all."""
HELD_OUT = 512
RIGHT = 0.2
"""Share of the teacher's answers in which nothing is left out."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": END,
    "eos_token_id": END,
}

Sum = tuple[int, ...]
"""The summands."""


def sums() -> tuple[list[Sum], list[Sum]]:
    """Those to train on and those held out, of all."""
    every: list[Sum] = list(itertools.product(range(10), repeat=4))
    random.Random(0).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def question(added: Sum) -> str:
    return "+".join(map(str, added)) + "="


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def reward(asked: Sum, answer: list[int]) -> float:
    """1 for the right digits and the end token behind them, else 0."""
    return float(answer == [*encode(str(sum(asked))), END])


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json: a token for each character."""
    words = {character: id for id, character in enumerate(CHARACTERS)} | {"<end>": END}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<end>|."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def taught(added: Sum, draw: random.Random) -> str:
    """The teacher's answer."""
    left_out = 0 if draw.random() < RIGHT else draw.choice(added)
    return str(sum(added) - left_out)


def write_examples(file: Path, examples: list[Sum]) -> None:
    """Rows with a question and the teacher's answer, as `torchwright train` reads them."""
    draw = random.Random(1)
    rows = [{"prompt": question(added), "completion": taught(added, draw)} for added in examples]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
