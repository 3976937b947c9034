"""Strangers' files through every verb: it does its work, or says in a `TorchwrightError` what is wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "hub")]
import torch
import verbs
import wrong_files
from safetensors.torch import save_file
from test_gguf import tiny_file  # pyright: ignore[reportMissingImports]

import folders
from forged_graphs import free_artifact
from language_artifacts import native_artifact
from mutations import mutate
from torchwright.core.errors import TorchwrightError
from torchwright.train.hang.read import OWN
from torchwright.train.kinds import kind_of, verb
from torchwright.train.run.observe.metrics import FILE

SECONDS = 20
"""Processor time after which a mutant counts as hanging; the usual one takes 0.1 s."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model's folder with all files that one may have."""
    folder = folders.save(folders.causal("Llama"), tmp_path_factory.mktemp("good") / "model")
    folders.write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True})
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    )
    return folder


def told(call: Callable[[], None], what: str) -> bool:
    """Call a verb; return whether it refused, and fail for any other exception and for a call without an end."""
    start = time.process_time()
    try:
        call()
        refused = False
    except TorchwrightError as error:
        refused, said = True, str(error)
        if said != said.encode(errors="replace").decode():  # pytest-xdist could not pass it on, either
            raise AssertionError(f"{what}: {said[:300]!a} is no UTF-8") from None
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:300]!a}") from error
    assert time.process_time() - start < SECONDS, what
    return refused


EXAMPLES: dict[str, dict[str, Any]] = {
    "head_dim of a string": {"head_dim": "8"},
    "quantization_config of a number": {"quantization_config": 5},
    "quantization_config of a list": {"quantization_config": {"quant_method": []}},
    "model_type of a list": {"model_type": []},
    "architectures of a number": {"architectures": 5},
    "architectures of numbers": {"architectures": [5]},
    "10**18 layers": {"num_hidden_layers": 10**18},
    "10**18 heads": {"num_attention_heads": 10**18},
    "a rope of NaN": {"rope_parameters": {"rope_type": "linear", "factor": float("nan"), "rope_theta": 1e4}},
    "an infinite base": {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
    "a base of 0": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "a factor of 0": {"rope_parameters": {"rope_type": "dynamic", "factor": 0, "rope_theta": 1e4}},
    "yarn of infinity": {"rope_parameters": {"rope_type": "yarn", "factor": float("inf"), "rope_theta": 1e4}},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_wrong_config_is_refused_by_every_verb(model: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | EXAMPLES[name]
    (folder / "config.json").write_text(json.dumps(config))
    for verb_name in ("serve", "generate", "train", "plan-layout"):
        assert told(lambda: verbs.OF_FOLDERS[verb_name](folder), f"{verb_name} {name}"), verb_name  # noqa: B023
    for verb_name in ("optimize", "export"):  # transformers may read what the native decoder does not
        told(lambda: verbs.OF_FOLDERS[verb_name](folder), f"{verb_name} {name}")  # noqa: B023


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_beside_a_model_is_not_imported(model: Path, tmp_path: Path, model_type: str) -> None:
    """What `trust_remote_code` of transformers would run."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    evil = {
        "auto_map": dict.fromkeys(names, "evil.Evil"),
        "tokenizer_class": "Evil",
        "model_type": model_type,
    }
    folders.write_json(folder / "config.json", config | evil)
    folders.write_json(folder / "tokenizer_config.json", evil)
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'owned')!r}).touch()\n")
    for verb_name, call in verbs.OF_FOLDERS.items():
        told(lambda: call(folder), verb_name)  # noqa: B023
    assert not (tmp_path / "owned").exists()


def test_a_header_of_infinities_is_refused(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    header = b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 1e999]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for name in ("serve", "generate", "train"):
        assert told(lambda: verbs.OF_FOLDERS[name](folder), name)  # noqa: B023


@pytest.mark.parametrize("file", ["x" * 10_000, "a\0b", "\ud800", "../other", 5])
def test_an_index_of_impossible_names_is_refused(model: Path, tmp_path: Path, file: Any) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    index = {"weight_map": {"model.embed_tokens.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("generate", "train"):
        assert told(lambda: verbs.OF_FOLDERS[name](folder), name)  # noqa: B023


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_what_is_no_regular_file_is_not_read(model: Path, tmp_path: Path, kind: str, file: str) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / file).unlink()
    if kind == "FIFO":
        os.mkfifo(folder / file)
    elif kind == "device":
        (folder / file).symlink_to("/dev/zero")
    else:
        (folder / file).mkdir()
    for name in ("serve", "generate"):
        told(lambda: verbs.OF_FOLDERS[name](folder), name)  # noqa: B023


@pytest.mark.parametrize("kind", ["FIFO", "device", "circle of links"])
def test_training_data_that_is_no_regular_file_is_refused(model: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "rows.jsonl"
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    for name, call in verbs.of_data(model).items():
        assert told(lambda: call(tmp_path / "data"), name)  # noqa: B023


@pytest.mark.parametrize(
    "files", [10**30, {"a" * 5000: ""}, {"../model.safetensors": ""}, {"a.safetensors": 5}, []]
)
def test_a_checkpoint_that_lists_no_files_of_its_own_is_refused(tmp_path: Path, files: Any) -> None:
    verbs.write_checkpoint(tmp_path)
    (path,) = tmp_path.rglob("checkpoint.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}))
    assert told(lambda: verbs.resume(tmp_path), "train --resume")


@pytest.mark.parametrize("name", ["recipe.json", "manifest.json"])
def test_an_artifact_of_brackets_is_not_served(tmp_path: Path, name: str) -> None:
    (tmp_path / "recipe.json").write_text('{"workload": {"kind": "language"}}')
    (tmp_path / name).write_bytes(b"[" * 100_000)
    assert told(lambda: verbs.serve(tmp_path), name)


@pytest.mark.parametrize(
    "text",
    [
        b"a = " + b"[" * 50_000,
        b"a = " + b"9" * 5_000,
        b"a" + b".a" * 50_000 + b" = 1",
        b"\xff",
        b"a = nan\n[model",
    ],
    ids=["brackets", "digits", "dots", "bytes", "cut"],
)
def test_a_run_file_of_nonsense_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    assert told(lambda: read_run_file(path), "train")


def read_run_file(path: Path) -> None:
    verb(kind_of(path), "read")(path)


@dataclass(frozen=True)
class Source:
    """A good folder, the verbs that read it, and the mutation of a copy."""

    folder: Path
    calls: dict[str, Callable[[Path], None]]
    mutate: Callable[[Path, random.Random], str] = wrong_files.break_one


def fuzz(
    sources: dict[str, Source], count: int, seed: int, work: Path, record: Callable[[str, object], None]
) -> None:
    """Pass mutants of folders through all verbs of their kind; record how many each did or refused."""
    chance, counts = random.Random(seed), Counter[tuple[str, str]]()
    faults: dict[str, str] = {}
    names = list(sources)
    for index in range(count):
        name = chance.choice(names)
        source = sources[name]
        copy = Path(shutil.copytree(source.folder, work / "copy", symlinks=True))
        what = ascii(f"mutant {index} of seed {seed}, {name}: {source.mutate(copy, chance)}")
        for verb_name, call in source.calls.items():
            try:
                refused = told(lambda: call(copy), f"{verb_name}, {what}")  # noqa: B023
            except AssertionError as fault:
                faults.setdefault(_class_of(fault), str(fault))
                counts[verb_name, "wrong"] += 1
            else:
                counts[verb_name, "refused" if refused else "done"] += 1
        shutil.rmtree(copy)
    lines = [f"{verb_name}: {how} {number}" for (verb_name, how), number in sorted(counts.items())]
    record("counts", f"{count} mutants of seed {seed}, {sum(counts.values())} calls: " + ", ".join(lines))
    assert not faults, "\n\n".join(f"{place}: {fault}" for place, fault in sorted(faults.items()))


def _class_of(fault: AssertionError) -> str:
    """Return our innermost line of what was raised: the faults of one line are mended together."""
    if fault.__cause__ is None:
        return "no end"
    frames = traceback.extract_tb(fault.__cause__.__traceback__)
    ours = [frame for frame in frames if "/torchwright/" in frame.filename] or frames
    return f"{type(fault.__cause__).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"


@pytest.fixture(scope="module")
def sources(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    adapter, gguf, runs, data, checkpoints, artifacts, dumps, jobs = (
        tmp_path_factory.mktemp(name)
        for name in ("adapter", "gguf", "run", "data", "checkpoints", "artifacts", "dumps", "jobs")
    )
    _write_adapter(adapter)
    tiny_file(gguf)
    (runs / "run.toml").write_text(RUN)
    _write_data(data)
    verbs.write_checkpoint(checkpoints)
    _write_dumps(dumps)
    _write_job(jobs)
    native = native_artifact(model, artifacts / "native")
    free = free_artifact(artifacts / "free")
    of_gguf = {
        name: _on(verbs.OF_FOLDERS[name], "tiny.gguf")
        for name in ("generate", "serve", "quantize", "optimize", "train", "plan-layout")
    }
    return {
        "model": Source(model, verbs.OF_FOLDERS),
        "gguf": Source(gguf, of_gguf),
        "adapter": Source(adapter, verbs.of_adapters(model)),
        "run": Source(runs, {"train RUN.toml": _on(read_run_file, "run.toml")}),
        "data": Source(data, verbs.of_data(model)),
        "checkpoint": Source(checkpoints, {"train --resume": verbs.resume}, wrong_files.break_checkpoint),
        "dumps": Source(dumps, {"why-stuck": verbs.why_stuck, "query": verbs.query}),
        "job": Source(jobs, verbs.OF_RUNS),
        "language artifact": Source(native, verbs.OF_ARTIFACTS, mutate),
        "graph artifact": Source(free, verbs.OF_ARTIFACTS, mutate),
    }


def _write_data(folder: Path) -> None:
    """Rows in the layouts that most files have, and token ids."""
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    (folder / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 5)
    (folder / "rows.jsonl").write_text('{"prompt": "a b", "completion": "c d"}\n' * 5)
    (folder / "table.csv").write_text("text,label\n" + "a b c,1\n" * 5)
    (folder / "rows.json").write_text(json.dumps([{"instruction": "a", "output": "b"}] * 5))
    (folder / "words.txt").write_text("a b c d\n" * 20)
    np.save(folder / "ids.npy", np.arange(200, dtype=np.uint16) % 250)


def _write_dumps(folder: Path) -> None:
    """Dumps of two ranks, of which one never made the third call, as NCCL's recorder and ours write them."""
    calls = [
        {
            "record_id": number, "process_group": ["0", "default_pg"], "collective_seq_id": number + 1,
            "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18 + number, "input_sizes": [[4]],
            "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"],
            "state": "completed", "retired": number < 2, "is_p2p": False,
            "frames": [{"filename": "train.py", "line": 7, "name": "step"}],
        }
        for number in range(3)
    ]  # fmt: skip
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    for rank, made in enumerate((calls, calls[:2])):
        own = {"rank": rank, "world": 2, "since_ns": 1, "taken_ns": 10**18 + 9, "started_ns": 10**18}
        content = {"version": "2.10", "pg_config": groups, "entries": made, OWN: own}
        folders.write_json(folder / f"rank_{rank}.json", content)


def _write_job(folder: Path) -> None:
    """The folder of a training run of one process: its ledger and its figures."""
    second = 10**9
    lines = [
        {
            "ledger": 1,
            "host": "h",
            "pid": 1,
            "rank": 0,
            "world": 1,
            "wall": 10**18,
            "every": second,
            "launch": "",
        },
        {"t": 4 * second, "s": {"start": second, "step": 3 * second}, "step": 3},
        {"t": 5 * second, "s": {"checkpoint": second}, "checkpoint": 3, "end": True},
    ]
    _write_lines(folder / "ledger" / "rank00000-1-1.jsonl", lines)
    run = {
        "out": "out",
        "data": {"mixture": {"a": {"files": ["a.npy"], "weight": 1}}},
        "evaluation": {"every": 2},
    }
    sources = {"a": {"files": 1, "tokens": 500}}
    start = {"event": "start", "at": 0, "steps": 4, "torch": "2", "world": 1, "run": run, "data": sources}
    figures: list[dict[str, Any]] = [
        {"step": step, "tokens": 8 * step, "tokens_per_s": 9.5, "loss": 3 / step, "lr": 1e-3, "epoch": 0.1}
        for step in (1, 2, 3)
    ]
    events: list[dict[str, Any]] = [
        {"event": "evaluation", "at": 3, "validation_loss": 1.2},
        {"event": "broken_rows", "file": "a.jsonl", "broken": 1, "rows": [[1, "no text"]]},
        {"event": "sample", "at": 3, "text": "a b", "prompt": "a"},
        {"event": "memorizes", "at": 3, "best": 2},
        {"event": "end", "at": 4},
    ]
    _write_lines(folder / FILE, [start, *figures, *events])


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _write_adapter(folder: Path) -> None:
    """LoRA of rank 2 on the model's query projections, as peft writes it."""
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"]}
    folders.write_json(folder / "adapter_config.json", settings)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {f"{name}.lora_A.weight": torch.randn(2, 32), f"{name}.lora_B.weight": torch.randn(32, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")


RUN = """
out = "out"
tokens = 1_536
batch_tokens = 256
context = 32
precision = "fp32"
threads = 1

[model]
folder = "base"

[data]
train = ["a.npy", "b.npy"]

[optimizer]
lr = 3e-3
betas = [0.9, 0.95]

[lora]
rank = 4
alpha = 8.0

[parallel]
dp = 1
"""


def _on(call: Callable[[Path], None], file: str) -> Callable[[Path], None]:
    return lambda folder: call(folder / file)


def test_a_few_wrong_files(
    sources: dict[str, Source], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    fuzz(sources, 12, 0, tmp_path, record_property)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_thousands_of_wrong_files(
    sources: dict[str, Source], tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    fuzz(sources, 1000, seed, tmp_path, record_property)
