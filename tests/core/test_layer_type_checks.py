"""No code decides by `isinstance` that a module is one of torch's layers, where a subclass may compute something else.

A check that only counts, names or lists layers is allowed, with its reason. A rewrite asks
`torchwright.core.layer_types`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

import torchwright

SOURCE = Path(torchwright.__file__).parent
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList)
ALLOWED = {
    "optimization.decode_bench": "counts bytes that a call reads",
    "models.decoder.model": "asks whether anything is left to pack",
    "models.decoder.recorded": "asks whether anything is left to pack",
    "models.decoder.seq2seq.translator": "asks whether anything is left to pack",
    "models.diffusion.precision": "chooses what stays in float32, which is right for any class",
    "optimization.engines.apply": "properties that say what is worth a look",
    "optimization.engines.describe": "figures for the order of trials",
    "exporter.targets.executorch.language": "lists the layers of which the report says why they stay",
    "core.layer_types": "answers the question",
    "hardware.measure.microbench": "counts products",
    "serve.engine.invariance": "asks whether anything is left to pack",
    "models.speech.native": "asks whether anything is left to pack",
    "optimization.techniques.dtype": "autocast of the layer's own forward, which is right for any class",
    "optimization.techniques.packed_convolution": "tells linear layers from convolutions among those that were asked",
    "optimization.techniques.shared.batchnorm": "watches candidates in a call, which shows what each computes",
    "optimization.techniques.shared.int8": "tells linear layers from convolutions among those that were asked",
    "optimization.techniques.shared.int8_layers": "tells linear layers from convolutions among those that were asked",
    "optimization.techniques.shared.own_padding": "watches candidates in a call, which shows what each computes",
    "optimization.techniques.shared.purity": "refuses calls, and a subclass is refused before",
    "optimization.techniques.shared.rounding": "tells linear layers from convolutions among exact types",
    "optimization.techniques.shared.wrapping": "switches off a fast path that subclasses have, too",
    "testing.models": "fills statistics of its own models",
    "testing.subclasses": "fills statistics of its own models",
    "testing.test_techniques": "skips recurrent layers of its own models where no kernel has their type",
    "train.media.adapt": "asks layer_types.overridden; an adapter replaces nothing",
    "train.media.model": "averages statistics that subclasses keep, too",
    "train.model.foreign": "tells which way round a weight lies, and whether convolutions stand beside",
    "train.model.lora": "tells which way round a weight lies, which a subclass does not change",
    "train.model.lora_files": "tells which way round a weight lies",
    "train.parallel.mixers": "divides layers that this package made",
    "train.prove.trace": "watches calls",
    "train.run.objectives.learner": "asks whether dropout is there",
    "train.run.objectives.precision": "asserts what was chosen by its exact class",
}
"""Module of Torchwright → why its `isinstance` of a layer of torch is right for subclasses."""


def test_what_rewrites_asks_whether_a_subclass_computes_the_same() -> None:
    found = {name for path in sorted(SOURCE.rglob("*.py")) for name in _checks(path)}
    assert found - ALLOWED.keys() == set(), "ask layer_types.deviation before a layer is replaced"
    assert ALLOWED.keys() - found == set(), "no isinstance of a layer is left there"


def test_the_check_sees_names_tuples_and_unions() -> None:
    text = "isinstance(m, LAYERS)\nisinstance(m, nn.Linear | Other)\nisinstance(m, str)"
    names = {"nn": nn, "LAYERS": (nn.Linear,), "Other": dict}
    assert len(list(_layer_checks(_type_checks(ast.parse(text)), names))) == 2


def _checks(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if "nn" not in text or not re.search(r"\b(isinstance|issubclass)\b", text):
        return
    calls = list(_type_checks(ast.parse(text)))
    if not calls:
        return
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    try:
        names = vars(importlib.import_module(f"torchwright.{name.removesuffix('.__init__')}"))
    except ImportError:  # a library of an extra that is not installed
        return
    yield from (name for _ in _layer_checks(calls, names))


def _type_checks(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            yield node


def _layer_checks(calls: Iterable[ast.Call], names: dict[str, Any]) -> Iterator[ast.Call]:
    """Calls of isinstance whose second argument holds a layer class of torch."""
    names = dict(names)  # eval adds to it
    for node in calls:
        try:
            kinds = eval(compile(ast.Expression(node.args[1]), "", "eval"), names)
        except (NameError, AttributeError):  # of a name that the function binds
            kinds = ()
        if any(_is_layer(kind) for kind in _flat(kinds)):
            yield node


def _flat(kinds: Any) -> Iterator[Any]:
    if isinstance(kinds, tuple):
        for kind in kinds:
            yield from _flat(kind)
    else:
        yield from getattr(kinds, "__args__", (kinds,))


def _is_layer(kind: Any) -> bool:
    torchs = (
        inspect.isclass(kind)
        and issubclass(kind, nn.Module)
        and kind.__module__.startswith("torch.nn.modules")
    )
    return torchs and kind is not nn.Module and kind not in CONTAINERS
