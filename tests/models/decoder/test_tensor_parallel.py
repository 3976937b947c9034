"""A decoder that several processes compute together, against the same in one process."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from divided import Answer, Case, answer, answers, opened_without_kernels
from tiny import VOCABULARY, build, save, token_ids

from preloaded import PRELOADED
from torchwright.core.errors import ModelError
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.tensor_parallel.processes import Processes, ProcessesError
from torchwright.models.decoder.tensor_parallel.shape import Place
from torchwright.train.prove import processes

IDS = token_ids(2, 30)
BF16 = torch.bfloat16
OF_TWO = (
    "llama-tied-biases",  # biases of the layers that leave a block, which one process adds
    "phi3",  # one tensor for query, key and value
    "glm",  # rows in another order than in the file
    "gemma2",  # soft caps, norms after blocks, tied
    "qwen3",  # norms by head
    "granite",
    "gpt-oss",  # sinks; experts in one tensor, with biases
    "glm4-moe",  # a shared expert
    "qwen3-moe",
    "deepseek-v2",  # latent attention
    "deepseek-v3",
)
OF_FOUR = ("llama-one-kv-head", "qwen2", "gpt-oss", "glm4-moe")
"""With fewer key-value heads than processes."""
QUANTIZED = (None, "w8a8", "w4a8", "w4a16")


@pytest.fixture(autouse=True)
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PRELOADED", PRELOADED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a model's name and changes, written once."""

    @functools.cache
    def folder(name: str, **fields: Any) -> Path:
        return save(build(name, **fields), tmp_path_factory.mktemp(name))

    return folder


def compare(cases: dict[str, Case], tp: int, *, shared: bool = True) -> dict[str, tuple[Answer, Answer]]:
    """Name → the answers of one process and of `tp`, all of which have to give the same bits."""
    of_processes = processes.on_processes(tp, answers, tp, [*cases.values()], IDS, shared)
    found = {}
    for place, (name, case) in enumerate(cases.items()):
        first = of_processes[0][place]
        for other in of_processes[1:]:
            assert np.array_equal(other[place].logits, first.logits), name
            assert other[place].tokens == first.tokens, name
        found[name] = answer(case, IDS), first
    return found


def relative(logits: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(logits - wanted) / np.linalg.norm(wanted))


def check_equal(found: dict[str, tuple[Answer, Answer]]) -> None:
    for name, (one, several) in found.items():
        error = float(abs(several.logits - one.logits).max())
        assert error < 2e-5, (name, error)
        assert several.tokens == one.tokens, name


@pytest.mark.plain("gloo")
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])
def test_two_processes_give_what_one_does(shared: bool, folders: Any) -> None:
    names = OF_TWO if shared else OF_TWO[:1]
    cases = {name: Case(folders(name)) for name in names}
    cases["an odd vocabulary"] = Case(folders("llama", vocab_size=VOCABULARY + 1))
    check_equal(compare(cases, 2, shared=shared))


@pytest.mark.slow
def test_four_processes_share_key_value_heads(folders: Any) -> None:
    found = compare({name: Case(folders(name)) for name in OF_FOUR}, 4)
    check_equal(found)
    for name in OF_FOUR:
        assert found[name][1].kv_heads == 1, name


def test_packed_layers_round_as_in_one_process(folders: Any) -> None:
    """bf16 and w4a16 differ by the rounding of sums alone; 8-bit inputs are rounded part by part, which is finer."""
    folder = folders("llama-tied-biases", intermediate_size=128)
    exact = answer(Case(folder), IDS).logits
    cases = {str(quantize): Case(folder, BF16, quantize) for quantize in QUANTIZED}
    for name, (one, several) in compare(cases, 2).items():
        error, own = (relative(part.logits, exact) for part in (several, one))
        assert error < 1.2 * own + 0.003, (name, error, own)
        if name in ("None", "w4a16"):
            assert relative(several.logits, one.logits) < 0.02, name


@pytest.mark.parametrize("of", [0, 1])
def test_one_process_without_shared_memory_leaves_all_to_gloo(of: int, tmp_path: Path) -> None:
    """Like processes on two machines: all have to agree, or some would wait for ever."""
    for shares, reason, left in processes.on_processes(2, opened_without_kernels, of, tmp_path):
        assert not shares
        assert "no compiler" in reason
        assert not left


def test_a_lost_process_is_named() -> None:
    class Lost:
        def sum(self, x: torch.Tensor) -> None:
            raise RuntimeError("process 1 has ended, or let go of the model")

    with pytest.raises(ProcessesError, match=r"lost each other.*process 1 has ended"):
        Processes(0, 2, Lost()).sum(torch.ones(2))


def test_a_process_without_the_others_says_how_to_start_them(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProcessesError, match=r"tp=2 takes 2 processes.*torchrun --nproc-per-node 2"):
        load_decoder(folders("llama-tied-biases"), tp=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ProcessesError, match="Found: 3 processes"):
        load_decoder(folders("llama-tied-biases"), tp=2)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("llama-tied-biases", {"tp": 0}, "tp=0"),
        ("llama-tied-biases", {"tp": 3}, "3 does not divide the model's query heads"),
        ("llama-tied-biases", {"tp": 2, "make_linear": torch.nn.Linear}, "make_linear"),
        ("llama-tied-biases", {"tp": 2, "quantize": "w4a16"}, "cuts the groups of w4a16"),
        ("olmo2", {"tp": 2}, "norms of queries and keys over all heads together"),
        ("lfm2", {"tp": 2}, "recurrent layers"),
        ("gemma4", {"tp": 2}, "layers of different sizes"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_words(
    name: str, options: dict[str, Any], said: str, folders: Any
) -> None:
    with pytest.raises(ModelError, match=said):
        load_decoder(folders(name), **options)


def test_key_value_heads_that_neither_divide_nor_are_divided(folders: Any) -> None:
    folder = folders("llama", num_attention_heads=12, num_key_value_heads=4, hidden_size=96)
    with pytest.raises(ModelError, match=r"nor do they divide it.*4 key-value heads"):
        load_decoder(folder, tp=6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ways"), [(8, 8, 2), (8, 2, 4), (8, 1, 8), (12, 3, 6), (8, 4, 4)]
)
def test_each_process_has_the_key_value_heads_of_its_queries(heads: int, kv_heads: int, ways: int) -> None:
    for rank in range(ways):
        place = Place(rank, ways)
        wanted = {query * kv_heads // heads for query in place.of(heads)}
        assert {row // 5 for row in place.of_heads(kv_heads, 5)} == wanted


@pytest.mark.slow  # two processes import torch
def test_torchrun_starts_them(folders: Any, tmp_path: Path) -> None:
    folder = folders("llama-tied-biases")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torchwright as tw\n"
        "model = tw.load_decoder(sys.argv[1], tp=2)\n"
        "print(model.generate([[5, 6, 7]], max_new_tokens=4, stop=[]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(folder)], capture_output=True, text=True, timeout=240, check=False
    )
    wanted = load_decoder(folder).generate([[5, 6, 7]], max_new_tokens=4, stop=[])
    assert done.stdout.split("\n")[:2] == [str(wanted)] * 2, done.stderr
