"""Verbs on strangers' files, called in this process: each reads all that its command line reads."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from torchwright.core.errors import ArtifactError
from torchwright.exporter.base import exports
from torchwright.hub.chat_template import ChatTemplate
from torchwright.models.decoder.adapters import read_adapter
from torchwright.models.decoder.families import read_decoder_config
from torchwright.models.decoder.load import load_decoder
from torchwright.models.diffusion.folder import open_pipeline
from torchwright.models.segment.load import load_segmenter
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.load import load
from torchwright.optimization.continuation import generate as answer_with
from torchwright.optimization.engines.base import engines
from torchwright.optimization.open_model import open_speech
from torchwright.optimization.rebuild import workload_of
from torchwright.report.terminal import waterfall
from torchwright.serve.folder import find
from torchwright.serve.options import EngineOptions
from torchwright.serve.preflight import preflight
from torchwright.serve.text.codec import Tokenizer
from torchwright.train.hang import show as hang
from torchwright.train.hang.analyse import analyse
from torchwright.train.hang.read import read_dumps
from torchwright.train.kinds import kind_of_model
from torchwright.train.ledger import read_account
from torchwright.train.ledger import show as ledger
from torchwright.train.model import Transformer
from torchwright.train.model.weights import check_shapes, load_weights
from torchwright.train.planning.models import read_model
from torchwright.train.query.collect import collect
from torchwright.train.query.database import Database
from torchwright.train.query.page import render as render_questions
from torchwright.train.run.config.read import parse_run
from torchwright.train.run.observe import page
from torchwright.train.run.observe.sample import sample
from torchwright.train.run.observe.survey import survey
from torchwright.train.run.runtime import checkpoint
from torchwright.train.run.runtime.processes import processes
from torchwright.workloads.detect import from_target


def serve(folder: Path) -> None:
    """The checks before the start, the HTTP process's files, and what the engine loads."""
    target = find(str(folder))
    preflight(target, EngineOptions(model=str(folder)))
    Tokenizer(target.folder)
    ChatTemplate(target.folder)
    load_decoder(target.folder, torch.bfloat16)


def generate(folder: Path, **options: Any) -> None:
    answer_with(
        str(folder),
        "a b",
        **{
            "max_new_tokens": 2,
            "seed": 0,
            "sampling": {},
            "quantize": None,
            "kv": None,
            "dtype": "fp32",
            "device": "cpu",
            "adapter": None,
            "trust": False,
            **options,
        },
        on_text=lambda text: None,
        on_notice=lambda text: None,
    )


def quantize(folder: Path) -> None:
    generate(folder, quantize="w8a8", dtype=None)


def optimize(folder: Path) -> None:
    from_target(str(folder), prompt_tokens=4, new_tokens=2).build()


def export(folder: Path) -> None:
    """Write GGUF, which is made of the folder's files without the model."""
    out = folder.parent / "gguf"
    out.mkdir(exist_ok=True)
    exports.get("gguf").write(SimpleNamespace(folder=folder, name="a stranger's"), "q8_0", out)  # type: ignore[arg-type]


def train(folder: Path) -> None:
    kind_of_model(folder)
    with torch.device("meta"):
        model = Transformer(read_decoder_config(folder))
    check_shapes(model, folder)
    model.to_empty(device="cpu")
    load_weights(model, folder)


def plan(folder: Path) -> None:
    read_model(str(folder))


OF_FOLDERS: dict[str, Callable[[Path], None]] = {
    "serve": serve,
    "generate": generate,
    "quantize": quantize,
    "optimize": optimize,
    "export": export,
    "train": train,
    "plan-layout": plan,
    "transcribe": lambda folder: open_speech(str(folder)) and None,
    "segment": lambda folder: load_segmenter(folder) and None,
    "imagine": lambda folder: open_pipeline(folder) and None,
}


def verify(folder: Path) -> None:
    """Read what `verify` reads before it starts processes, and load the artifact as these do."""
    recipe, _ = artifact.open_artifact(folder)
    with contextlib.suppress(ArtifactError):  # it names a factory
        workload_of(folder, recipe, trust=False)
    load(folder)


def bench(folder: Path) -> None:
    """Read what `bench` reads before it starts processes."""
    recipe, manifest = artifact.open_artifact(folder)
    engines.get(manifest.engine)
    workload_of(folder, recipe, trust=False, cases_only=manifest.self_contained)


def why_stuck(folder: Path) -> None:
    dumps, notes = read_dumps(folder)
    found = analyse(dumps, patience=1.0)
    hang.evidence(found, notes)
    hang.plain(found, notes)


def time_report(folder: Path) -> None:
    account = read_account(folder)
    ledger.table(account)
    ledger.plain(account)


def query(folder: Path) -> None:
    """Read every table of a run, and answer every question that has a name, as `query --page`."""
    rows = collect([folder])
    render_questions(Database(rows), rows, [str(folder)])


def report(folder: Path) -> None:
    """Print the waterfall of an artifact, as `report --all`; `report` alone prints a path."""
    waterfall(artifact.read_recipe(folder), artifact=str(folder), every=True)


OF_ARTIFACTS: dict[str, Callable[[Path], None]] = {
    "verify": verify,
    "bench": bench,
    "report": report,
    "serve ARTIFACT": lambda folder: find(str(folder)) and None,
}


OF_RUNS: dict[str, Callable[[Path], None]] = {
    "time-report": time_report,
    "report RUN": lambda folder: page.write(folder) and None,
    "query": query,
}


def of_adapters(model: Path) -> dict[str, Callable[[Path], None]]:
    """Return the verbs that add an adapter to a model."""
    return {
        "generate --adapter": lambda folder: generate(model, adapter=str(folder)),
        "quantize --adapter": lambda folder: generate(
            model, adapter=str(folder), quantize="w8a8", dtype=None
        ),
        "serve --adapter": lambda folder: serve_adapter(model, folder),
        "serve --adapter NAME=": lambda folder: serve_adapter_by_name(model, folder),
    }


def serve_adapter(model: Path, folder: Path) -> None:
    target = find(str(model))
    preflight(target, EngineOptions(model=str(model), adapter=str(folder)))
    load_decoder(model, torch.bfloat16, adapter=str(folder))


def serve_adapter_by_name(model: Path, folder: Path) -> None:
    read_adapter(folder, load_decoder(model, torch.bfloat16).decoder, model)


def of_data(model: Path) -> dict[str, Callable[[Path], None]]:
    """Return the verbs that look at training data, for a folder of files."""

    def run_of(folder: Path) -> Any:
        files = {"train": [str(path) for path in sorted(folder.iterdir())]}
        told = {"out": str(folder.parent / "out"), "tokens": 32, "batch_tokens": 32, "context": 32}
        told |= {"precision": "fp32", "model": {"folder": str(model)}, "data": files}
        return parse_run(told, "the fuzz")

    def check(folder: Path) -> None:
        for seen in survey(run_of(folder), folder):
            assert seen.refused is None or "Traceback" not in seen.refused

    def show(folder: Path) -> None:
        shutil.rmtree(folder.parent / "out", ignore_errors=True)
        sample(run_of(folder), folder, 0)

    return {"data check": check, "data show": show}


STATE = {"model.a": (8, 4), "model.b": (3,), "optimizer.a": (8, 4)}


def write_checkpoint(folder: Path) -> None:
    """Write a checkpoint of step 2 as a run of one process does."""
    with processes(60):
        made = checkpoint.Checkpoints(folder, 2, lambda step: None)
        described = checkpoint.Described(step=2, tokens=64, run={"tokens": 64}, facts={"torch": "2"})
        made.save({name: torch.ones(shape) for name, shape in STATE.items()}, described)
        made.wait()


def resume(folder: Path) -> None:
    """Read the newest checkpoint, as a run that goes on does."""
    with processes(60):
        for newest in checkpoint.whole(folder / checkpoint.FOLDER)[-1:]:
            checkpoint.describe(newest)
            checkpoint.load(newest, {name: torch.empty(shape) for name, shape in STATE.items()})
