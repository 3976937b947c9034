"""Models with trained weights, judged by their tasks: the original, compilers by hand, third-party engines and ours.

    python -m benchmarks.optimize.trained [--only NAME …] [--max-drop 0.01] [--time-budget 150] [--sounds DATA]
                                          [--json FILE]

The models, with the packages of their weights and inputs, are those of benchmarks/models/trained. A search judges by
the task's metric on some inputs; every contender is judged on others. The budget is one for all: the peer is the
fastest of those that lose no more of the metric. OpenVINO's int8 is NNCF's with its defaults, calibrated by the inputs
of the search. All live contenders take turns. A contender that fails gives the reason.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

import torchwright as tw
from benchmarks.harness import contenders, run
from benchmarks.harness.contenders import entry_of
from benchmarks.harness.engines import ByOnnxRuntime, ByOpenVino
from benchmarks.harness.run import Row, in_short, times, triple
from benchmarks.models.trained import (
    crystals,
    file_types,
    own,
    pictures,
    pitch,
    pronunciation,
    sentences,
    speech_or_not,
    transcripts,
    voices,
)
from benchmarks.models.trained.task import Trained
from torchwright.workloads.module import ModuleWorkload

ORIGINAL, OURS = "eager fp32", "torchwright"
MODELS: dict[str, Callable[[Path], Trained]] = {
    "efficientnet_lite0": lambda _: pictures.efficientnet_lite(0),
    "efficientnet_lite1": lambda _: pictures.efficientnet_lite(1),
    "efficientnet_lite2": lambda _: pictures.efficientnet_lite(2),
    "minilm": lambda _: sentences.minilm(),
    "crepe": lambda sounds: pitch.crepe("full", sounds),
    "resemblyzer": voices.resemblyzer,
    "silero_vad": speech_or_not.silero_vad,
    "bundled": lambda _: own.bundled(),
    "bundled_speech": lambda _: own.bundled_speech(),
    "chgnet": lambda _: crystals.chgnet(),
    "moonshine": transcripts.moonshine,
    "g2p_en": lambda _: pronunciation.g2p_en(),
    "magika": lambda _: file_types.magika(),
}
TRANSFORMERS = ("minilm", "bundled", "bundled_speech", "moonshine")
"""Models that NNCF quantizes as transformers."""
SECONDS = 300.0
"""Limit until a contender can be called."""
COLUMNS = ("model", "contender", "ms", "over eager", "metric", "loss", "within budget")


def main() -> None:
    options = run.options(
        __doc__,
        only=tuple(MODELS),
        max_drop=0.01,
        time_budget=150.0,
        sounds=run.Option(type=Path, default=Path("/")),
    )
    note = f"loss of the metric allowed: {options.max_drop:.1%}; search: {options.time_budget:.0f} s a model"
    rows = run.Rows(options.json, COLUMNS, note=note)
    for name in options.only:
        try:
            row = measured(name, options)
        except Exception as error:  # whatever a model dies of is its row
            rows.add({"model": name, "failure": in_short(error)}, f"{name}: {in_short(error)}")
            continue
        for contender, entry in row["contenders"].items():
            print(run.line(cells(name, contender, entry)), flush=True)
        over = f"best within the budget: {row['best']}" if "best" in row else "no peer is within the budget"
        rows.add(row, f"{name}: {over}; ours over it: {times(row['over']) if 'over' in row else 'none'}")


def measured(name: str, options: argparse.Namespace) -> Row:
    run.say(f"{name}: building")
    trained = MODELS[name](options.sounds)
    with tempfile.TemporaryDirectory() as folder, contenders.contenders() as start:
        run.say(f"{name}: optimizing")
        out = f"{folder}/artifact"
        result = tw.optimize(
            trained.model,
            trained.search,
            metric=trained.search_metric,
            higher_is_better=trained.higher_is_better,
            max_drop=options.max_drop,
            time_budget=options.time_budget,
        )
        result.save(out)
        original = start(ORIGINAL, judged(trained, trained.model))
        if not original.fits:
            raise RuntimeError(original.failure)
        reference = original.observe()
        field = [original]
        for contender, model in [*peers(name, trained), (OURS, contenders.FromArtifact(trained.model, out))]:
            run.say(f"{name}: {contender}")
            field.append(start(contender, judged(trained, model), reference=reference, seconds=SECONDS))
        turns = contenders.take_turns(field)
        row: Row = {
            "model": name,
            "source": trained.source,
            "recipe": contenders.recipe_of(out),
            "claim": triple(result.speedup),
            "reference": reference,
            "contenders": {each.name: entry_of(each, turns, ORIGINAL, options.max_drop) for each in field},
        }
    for each in field:
        row["contenders"][each.name]["metric"] = each.quality.value if each.quality else reference
    row["contenders"][OURS]["recipe"] = row["recipe"]
    return row | best_peer(row["contenders"], turns)


def judged(trained: Trained, model: nn.Module) -> ModuleWorkload:
    """Return the workload that times one held-out call and judges by all of them."""
    return ModuleWorkload(
        model,
        trained.held_out[:1],
        metric=trained.held_out_metric,
        higher_is_better=trained.higher_is_better,
    )


def peers(name: str, trained: Trained) -> Iterator[tuple[str, nn.Module]]:
    model = trained.model
    for how in contenders.tried_by_hand():
        yield how, contenders.ByHand(model, how)
    yield "ONNX Runtime f32", ByOnnxRuntime(model)
    for precision in ("f32", "bf16", "int8"):
        yield (
            f"OpenVINO {precision}",
            ByOpenVino(model, precision, trained.search, transformer=name in TRANSFORMERS),
        )


def best_peer(entries: dict[str, Row], turns: contenders.Turns) -> Row:
    """Return the fastest peer within the budget, and the ratio of its time to ours."""
    within = [name for name, entry in entries.items() if name != OURS and entry.get("within_budget")]
    if not within:
        return {}
    best = min(within, key=lambda name: entries[name]["ms"])
    return {"best": best} | ({"over": triple(turns.speedup(best, OURS))} if "ms" in entries[OURS] else {})


def cells(name: str, contender: str, entry: Row) -> tuple[str, ...]:
    if "ms" not in entry:
        return name, contender, f"failed: {entry['failure']}", "", "", "", ""
    label = f"{contender} ({entry['recipe']})" if "recipe" in entry else contender
    within = "yes" if entry["within_budget"] else "no"
    gain, loss = times(entry["versus_eager"]), f"{entry['loss']:.2%}"
    return name, label, f"{entry['ms']:.2f}", gain, f"{entry['metric']:.4f}", loss, within


if __name__ == "__main__":
    main()
