"""Train the small Whisper that Torchwright bundles, on speech that `speech_corpus.py` makes.

The steps:

    python scripts/train_speech.py prepare FOLDER [--count N]       windows, as log-mel features
    python scripts/train_speech.py train FOLDER [--minutes M]     FOLDER/model, as transformers saves a Whisper
    python scripts/train_speech.py export FOLDER [--trained TEXT]  the weights in bfloat16 and a card, into the package
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.generation.configuration_utils import GenerationConfig

import speech_corpus as corpus
from torchwright.models.speech.whisper.features import LogMel

BUNDLED = Path(__file__).parents[1] / "src" / "torchwright" / "workloads" / "bundled" / "speech"
BANDS, FRAMES = 80, 100 * corpus.SECONDS
POSITIONS, LONGEST = corpus.TICKS_PER_SECOND * corpus.SECONDS, 48
SPECIAL = (
    "endoftext",
    "startoftranscript",
    "translate",
    "transcribe",
    "startoflm",
    "nospeech",
    "notimestamps",
)
WIDTH, LAYERS, DECODER_LAYERS, HEADS = 160, 4, 2, 5
CHARACTERS = " abcdefghijklmnopqrstuvwxyz"
"""The characters that the encoder alone is trained to spell; number 0 is CTC's blank."""
BATCH = 32
RATE, WARM_UP, DECAY = 2e-3, 60, 0.4
"""The learning rate, its first steps, and the share of the time in which it falls to nothing."""
VALIDATE_SECONDS = 400


def known_words() -> set[str]:
    """All that the grammar's sentences are made of, letters among them."""
    return {word for seed in range(20_000) for word in corpus.sentence(Random(seed)).split()}


def make_tokenizer() -> Any:
    """A token for each word of the grammar and each byte, Whisper's special ones, and a timestamp for each tick."""
    words = known_words()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in sorted(words):
        built = "Ġ"
        for letter in word:
            if built + letter not in vocabulary:
                vocabulary[built + letter] = len(vocabulary)
                merges.append((built, letter))
            built += letter
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([f"<|{name}|>" for name in SPECIAL])
    made.add_tokens([f"<|{tick / corpus.TICKS_PER_SECOND:.2f}|>" for tick in range(POSITIONS + 1)])
    return made


def make_model(tokenizer: Any) -> WhisperForConditionalGeneration:
    """A Whisper of English alone over windows of `corpus.SECONDS`."""
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in SPECIAL}
    shared: dict[str, Any] = {
        "pad_token_id": ids["endoftext"],
        "bos_token_id": ids["endoftext"],
        "eos_token_id": ids["endoftext"],
        "decoder_start_token_id": ids["startoftranscript"],
    }
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=DECODER_LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        num_mel_bins=BANDS,
        max_source_positions=POSITIONS,
        max_target_positions=LONGEST,
        dropout=0.0,
        **shared,
    )
    model = WhisperForConditionalGeneration(config)
    settings: Any = GenerationConfig(
        max_length=LONGEST,
        suppress_tokens=[],
        begin_suppress_tokens=[ids["endoftext"]],
        no_timestamps_token_id=ids["notimestamps"],
        max_initial_timestamp_index=50,
        is_multilingual=False,
        **shared,
    )
    model.generation_config = settings
    return model


def begin(folder: Path) -> tuple[Any, WhisperForConditionalGeneration]:
    """The tokenizer and an untrained model in FOLDER/model."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    save(folder / "model", tokenizer, model)
    return tokenizer, model


def save(folder: Path, tokenizer: Any, model: WhisperForConditionalGeneration) -> None:
    """Write to a temporary folder first, then rename that."""
    beside = folder.with_name(folder.name + ".new")
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    tokenizer.save(str(beside / "tokenizer.json"))
    transformers.WhisperFeatureExtractor(feature_size=BANDS, chunk_length=corpus.SECONDS).save_pretrained(
        beside
    )
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


# ---- windows


def prepare(args: argparse.Namespace) -> None:
    if engine := corpus.missing():
        raise SystemExit(f"{engine} is not installed: apt-get install espeak-ng flite")
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer, _ = begin(args.folder)
    features = np.lib.format.open_memmap(
        args.folder / "features.npy", "w+", np.float16, (args.count, BANDS, FRAMES)
    )
    with (
        multiprocessing.Pool(initializer=_begin_worker, initargs=(args.folder,)) as pool,
        (args.folder / "said.jsonl").open("w") as rows,
    ):
        for index, (mel, said) in enumerate(pool.imap(_made, range(args.count), chunksize=32)):
            features[index] = mel
            rows.write(json.dumps({"ids": ids_of(tokenizer, said), "text": spelled(said)}) + "\n")
            if (index + 1) % 1000 == 0:
                print(f"{index + 1} of {args.count} windows", flush=True)
    features.flush()


_log_mel: LogMel | None = None


def _begin_worker(folder: Path) -> None:
    global _log_mel
    torch.set_num_threads(1)
    _log_mel = LogMel(folder / "model", bands=BANDS, frames=FRAMES)


def _made(seed: int) -> tuple[np.ndarray, Any]:
    assert _log_mel is not None
    found = corpus.window(seed, corpus.HEARD)
    return _log_mel(found.samples)[0].half().numpy(), found.said


def ids_of(tokenizer: Any, said: Any) -> list[int]:
    """A window's tokens: timestamps in pairs around text, the first alone of what is cut off."""
    name = {name: tokenizer.token_to_id(f"<|{name}|>") for name in SPECIAL}
    first = name["notimestamps"] + 1
    ids = [name["startoftranscript"]]
    for text, start, end in said:
        ids.append(first + start)
        if text is not None:
            ids += [*tokenizer.encode(f" {text}", add_special_tokens=False).ids, first + end]
    if not said:
        ids.append(name["nospeech"])
    return [*ids, name["endoftext"]]


def spelled(said: Any) -> str:
    return " ".join(text for text, _, _ in said if text is not None)


@dataclass
class Windows:
    """The training data, in an order that is drawn anew each time through."""

    features: np.ndarray
    rows: list[dict[str, Any]]
    pad: int

    @classmethod
    def read(cls, folder: Path, pad: int) -> Windows:
        rows = [json.loads(line) for line in (folder / "said.jsonl").read_text().splitlines()]
        return cls(np.load(folder / "features.npy", mmap_mode="r"), rows, pad)

    def batches(self, draw: np.random.Generator) -> Iterator[tuple[torch.Tensor, ...]]:
        """Features (B, M, T), tokens (B, L), letters (B, S) and their counts (B,), for ever."""
        while True:
            order = draw.permutation(len(self.rows))
            for at in range(0, len(order) - BATCH + 1, BATCH):
                yield self._batch(np.sort(order[at : at + BATCH]), draw)

    def _batch(self, places: np.ndarray, draw: np.random.Generator) -> tuple[torch.Tensor, ...]:
        mels = torch.from_numpy(self.features[places].astype(np.float32))
        for mel in mels:
            low = float(mel.min())
            for _ in range(2):
                start, width = draw.integers(FRAMES), draw.integers(25)
                mel[:, start : start + width] = low
                band, height = draw.integers(BANDS), draw.integers(12)
                mel[band : band + height] = low
        rows = [self.rows[place] for place in places]
        longest = max(len(row["ids"]) for row in rows)
        ids = torch.tensor([row["ids"] + [self.pad] * (longest - len(row["ids"])) for row in rows])
        letters = [[CHARACTERS.index(letter) + 1 for letter in row["text"]] for row in rows]
        counts = torch.tensor([len(row) for row in letters])
        most = max(1, int(counts.max()))
        return mels, ids, torch.tensor([row + [0] * (most - len(row)) for row in letters]), counts


# ---- training


class Trained(nn.Module):
    """The model, and a layer that spells from the encoder's states, which is dropped at the end."""

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.spell = nn.Linear(WIDTH, len(CHARACTERS) + 1)

    def forward(self, mels, ids, letters, counts) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of the decoder's tokens, and CTC's of the letters, each a mean over what there is to say."""
        states = self.model.model.encoder(mels).last_hidden_state
        hidden = self.model.model.decoder(
            input_ids=ids[:, :-1], encoder_hidden_states=states, use_cache=False
        ).last_hidden_state
        logits, wanted = self.model.proj_out(hidden), ids[:, 1:].clone()
        ended = (wanted == self.model.config.eos_token_id).cumsum(1) > 1
        wanted[ended] = -100
        words = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=0.05)
        logprobs = self.spell(states).float().log_softmax(-1).transpose(0, 1)
        lengths = torch.full_like(counts, len(logprobs))
        ctc = F.ctc_loss(logprobs, letters, lengths, counts, reduction="sum", zero_infinity=True)
        return words, ctc / counts.sum()


def optimizers(trained: Trained) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (Jordan et al., 2024), AdamW for all else."""
    matrices = [
        p
        for name, p in trained.model.named_parameters()
        if p.ndim == 2 and "embed" not in name and p.requires_grad
    ]
    chosen = {id(p) for p in matrices}
    others = [p for p in trained.parameters() if id(p) not in chosen and p.requires_grad]
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, weight_decay=0.01, betas=(0.9, 0.98)),
    ]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(args.folder / "model" / "tokenizer.json"))
    # Attention of products: on CPUs the backward pass of the fused one takes three times as long for heads of 32.
    model: Any = WhisperForConditionalGeneration.from_pretrained(
        args.folder / "model", attn_implementation="eager"
    )
    trained = Trained(model.float())
    spell = args.folder / "spell.pt"
    if args.more:
        trained.spell.load_state_dict(torch.load(spell, weights_only=True))
    chosen = optimizers(trained)
    windows = Windows.read(args.folder, model.config.eos_token_id)
    batches = windows.batches(np.random.default_rng(args.more))
    begun, last, step, sums = time.monotonic(), 0.0, 0, np.zeros(2)
    while (spent := time.monotonic() - begun) < 60 * args.minutes:
        share = spent / (60 * args.minutes)
        scale = min(1.0, (step + 1) / WARM_UP, (1 - share) / DECAY)
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = RATE * scale
        with torch.autocast("cpu", torch.bfloat16):
            words, ctc = trained(*next(batches))
        (words + 0.3 * ctc).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, sums = step + 1, sums + np.array([words.item(), ctc.item()])
        if step % 50 == 0:
            print(
                f"{spent / 60:.1f} min, step {step}: words {sums[0] / 50:.3f}, ctc {sums[1] / 50:.3f}",
                flush=True,
            )
            sums[:] = 0
        if spent - last > VALIDATE_SECONDS:
            last = spent
            save(args.folder / "model", tokenizer, model)
            torch.save(trained.spell.state_dict(), spell)
            print(f"word errors: {validate(args.folder)}", flush=True)
    save(args.folder / "model", tokenizer, model)
    torch.save(trained.spell.state_dict(), spell)
    print(f"{step} steps; word errors: {validate(args.folder)}", flush=True)


def validate(folder: Path, count: int = 40) -> dict[str, float]:
    """Return the word error rate on fresh sentences of voices that were heard, and of unheard ones."""
    from torchwright.models.speech.load import load_speech
    from torchwright.models.speech.score import edits

    model, found = load_speech(folder / "model"), dict[str, float]()
    for name, voices in (("heard", corpus.HEARD), ("never heard", corpus.NEVER_HEARD)):
        wrong = words = 0
        for index in range(count):
            spoken = corpus.window(1_000_000 + index, voices, single=True)
            wanted = spelled(spoken.said).split()
            wrong += edits(wanted, model.transcribe(spoken.samples).text.split())
            words += len(wanted)
        found[name] = wrong / words
    return found


# ---- the package


def export(args: argparse.Namespace) -> None:
    """The weights in bfloat16, what stands around them, and a card with what they score, all at once or nothing."""
    from speech_card import card

    model: Any = WhisperForConditionalGeneration.from_pretrained(args.folder / "model")
    tokenizer = Tokenizer.from_file(str(args.folder / "model" / "tokenizer.json"))
    exported = args.folder / "exported"
    save(exported, tokenizer, model.to(torch.bfloat16))
    said = card(
        exported,
        words=sum(len(word) > 1 for word in known_words()),
        windows=sum(1 for _ in (args.folder / "said.jsonl").open()),
        parameters=model.num_parameters(),
        trained=args.trained,
        sentences=args.sentences,
    )
    (exported / "README.md").write_text(said, encoding="utf-8")
    args.out.mkdir(parents=True, exist_ok=True)
    for file in exported.iterdir():
        shutil.copyfile(file, args.out / file.name)
    size = sum(file.stat().st_size for file in exported.iterdir())
    print(f"{args.out}: {size / 1e6:.1f} MB, {model.num_parameters():,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    for name, run in (("prepare", prepare), ("train", train), ("export", export)):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        command.set_defaults(run=run)
        if name == "prepare":
            command.add_argument("--count", type=int, default=20_000)
        if name == "train":
            command.add_argument("--minutes", type=float, default=60)
            command.add_argument("--more", type=int, default=0, metavar="N", help="go on, for the Nth time")
        if name == "export":
            command.add_argument("--out", type=Path, default=BUNDLED)
            command.add_argument(
                "--sentences", type=int, default=150, help="of each kind of voices, for the card"
            )
            command.add_argument(
                "--trained", default="not written down", help="how long and on what, for the card"
            )
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
