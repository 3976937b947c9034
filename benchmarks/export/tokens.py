# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""200 greedy tokens of the bundled language model in every runtime that continues text, compared with eager mode's.

    python -m benchmarks.export.tokens                       all of them
    python -m benchmarks.export.tokens --only executorch:fp32 gguf:bf16

Each package is written by `tw.export` and continues three prompts in its own runtime, through its own cache. Eager is
transformers, in bfloat16 for packages that transformers runs and in float32 for the others, whose sums are float32's. A
row has the number of equal tokens before the first that differs, and the gap between eager's two likeliest logits
there: a tie that another order of summation decides is not an error. ExecuTorch's own runner is measured, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.harness import run
from benchmarks.harness.run import BUNDLED
from torchwright.core.errors import TorchwrightError
from torchwright.exporter.export import PACKAGE, export
from torchwright.exporter.targets.executorch.target import MODEL as PTE
from torchwright.exporter.targets.gguf import MODEL as GGUF
from torchwright.workloads.huggingface import load_model

TOKENS = 200
PROMPTS = 3
LENGTH = 24
"""The most tokens of a prompt."""
END = 1
"""The bundled model's token for the end of a text."""
ROWS = (
    "executorch:fp32",
    "executorch:8da4w",
    "gguf:bf16",
    "gguf:q8_0",
    "gguf:q4_0",
    "safetensors:bf16",
    "safetensors:w8a8",
    "safetensors:w4a16",
)
Continue = Callable[[list[int]], "list[int] | str"]
"""A prompt's token ids → those of its greedy continuation, or its text."""


def main() -> None:
    options = run.options(__doc__, json=False, only=ROWS)
    columns = ("target", "precision", "same tokens, by prompt", "margin of eager where they part")
    note = f"{PROMPTS} prompts of {LENGTH} tokens at most, {TOKENS} greedy tokens each"
    run.Rows(columns=(*columns, "verifier's error", "MB"), note=note)
    for name in options.only:
        target, precision = name.split(":")
        with tempfile.TemporaryDirectory() as scratch:
            try:
                made = export("bundled", to=target, precision=precision, out=Path(scratch) / "out")
            except TorchwrightError as error:
                print(run.line((target, precision, f"refused: {error.reason[:200]}", "", "", "")), flush=True)
                continue
            if made.report["verdict"] != "holds":  # a runtime that crashes does so in the verifier's process
                print(run.line((target, precision, made.report["findings"][0][:200], "", "", "")), flush=True)
                continue
            dtype = torch.bfloat16 if target == "safetensors" else torch.float32
            for how, go_on in runtimes(target, made.path / PACKAGE).items():
                same, margins = compared(go_on, dtype)
                report = made.report
                figures = f"{report['largest_error']:.1e}", f"{report['size_bytes'] / 1e6:.1f}"
                cells = (how, precision, ", ".join(map(str, same)), ", ".join(margins), *figures)
                print(run.line(cells), flush=True)


def compared(go_on: Continue, dtype: torch.dtype) -> tuple[list[int], list[str]]:
    """Return the tokens until the first that differs, for each prompt, and eager's margin there."""
    eager = transformers(BUNDLED, dtype)
    same, margins = [], []
    for prompt in prompts():
        wanted = eager(prompt)
        agree = agreeing(wanted, go_on(prompt))
        same.append(agree)
        if agree < len(wanted):
            margins.append(f"{margin(prompt + wanted[:agree], dtype):.2g}")
    return same, margins


def agreeing(wanted: list[int], found: list[int] | str) -> int:
    """Return the tokens until the first that differs; of a text those that it begins with."""
    ends = range(len(wanted), -1, -1)
    if isinstance(found, str):
        return next(n for n in ends if found.startswith(tokenizer().decode(wanted[:n])))
    return next(n for n in ends if found[:n] == wanted[:n])


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


def prompts() -> list[list[int]]:
    """Return openings of the held-out text, evenly spread, cut so that their text has the same tokens."""
    text, words = (BUNDLED / "eval.txt").read_text(), tokenizer()
    places = [len(text) * index // PROMPTS for index in range(PROMPTS)]
    pieces = [words.encode(text[place : place + 1000]).ids for place in places]
    ends = [
        next(n for n in range(LENGTH, 0, -1) if words.encode(words.decode(ids[:n])).ids == ids[:n])
        for ids in pieces
    ]
    return [ids[:n] for ids, n in zip(pieces, ends, strict=True)]


def margin(ids: Sequence[int], dtype: torch.dtype) -> float:
    model = load_model(BUNDLED, "AutoModelForCausalLM").to(dtype)
    with torch.no_grad():
        first, second = model(input_ids=torch.tensor([ids])).logits[0, -1].float().topk(2).values.tolist()
    return first - second


def runtimes(target: str, folder: Path) -> dict[str, Continue]:
    """Return the runtimes that continue text from a package, by name."""
    if target == "executorch":
        return {"executorch": executorch(folder / PTE), "executorch's runner": runner(folder)}
    if target == "gguf":
        return {"gguf, llama.cpp": llama_cpp(folder / GGUF)}
    return {"safetensors, transformers": transformers(folder, torch.bfloat16)}


def transformers(folder: Path, dtype: torch.dtype) -> Callable[[list[int]], list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def go_on(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
            )
        return found[0, len(prompt) :].tolist()

    return go_on


def executorch(file: Path) -> Continue:
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(file).load_method("forward")
    assert method is not None

    start = 0

    def feed(ids: list[int]) -> int:
        nonlocal start
        logits = method.execute([torch.tensor([ids]), torch.tensor([start])])[0]
        start += len(ids)
        return int(logits.argmax())

    def go_on(prompt: list[int]) -> list[int]:
        nonlocal start
        start = 0
        return greedy(feed, prompt)

    return go_on


def greedy(feed: Callable[[list[int]], int], prompt: list[int]) -> list[int]:
    """Return the continuation of a prompt; `feed` reads tokens and returns the most likely next one."""
    found = [feed(prompt)]
    while len(found) < TOKENS and found[-1] != END:
        found.append(feed(found[-1:]))
    return found


def runner(folder: Path) -> Continue:
    """ExecuTorch's C++ runner, which reads text and writes text."""
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    model = TextLLMRunner(str(folder / PTE), str(folder / "tokenizer.json"))
    config = GenerationConfig()
    config.echo, config.temperature, config.max_new_tokens = False, 0.0, TOKENS
    config.num_bos = 1  # of the tokens that our prompts begin with

    def go_on(prompt: list[int]) -> str:
        words: list[str] = []
        model.reset()
        model.generate(tokenizer().decode(prompt), config, words.append)
        return "".join(words)

    return go_on


def llama_cpp(file: Path) -> Continue:
    import llama_cpp as library

    model = library.Llama(str(file), n_ctx=0, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)

    def feed(ids: list[int]) -> int:
        model.eval(ids)
        return int(model.scores[model.n_tokens - 1].argmax())

    def go_on(prompt: list[int]) -> list[int]:
        model.reset()
        return greedy(feed, prompt)

    return go_on


if __name__ == "__main__":
    main()
