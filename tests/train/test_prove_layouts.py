"""Layouts and runs proved: every pair of axes, triples with experts, real degrees, and what a run file adds."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from faults import seeded
from runs import CONFIG, MIXTURE, make_run
from tiny import COMMON, MODELS

from torchwright.cli import main
from torchwright.cli.printing import console
from torchwright.models.decoder import read_decoder_config
from torchwright.models.decoder.families import decoder_config
from torchwright.train.layout import Layout, LayoutError
from torchwright.train.prove import Divergence, LayoutProof, Proof, proof, prove, prove_layout, render
from torchwright.train.prove.proof import choose, read_model, used
from torchwright.train.prove.shrink import shrink
from torchwright.train.run.config.check import check_run
from torchwright.train.run.config.read import parse_run, read_run
from torchwright.train.run.config.run import Run

ALL = Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2)
DENSE = Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2)
DOCUMENTS = {"data": {"train": ["a.npy"], "packing": "documents"}}
RECURRENT = Layout(dp_replicate=2, dp_shard=2, tp=2)
ONE_KEY_HEAD = {"model": {"config": CONFIG | {"num_key_value_heads": 1}}}
SHARED_HEADS = {"model": {"config": CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 2}}}
UNTIED = {"model": {"config": CONFIG | {"tie_word_embeddings": False}}}
EXPERTS = {"model": {"config": CONFIG | MIXTURE}}


def config_folder(name: str, folder: Path, **fields: Any) -> Path:
    """A folder with nothing but a config.json, which is all that a proof reads."""
    kind, overrides = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(COMMON | overrides | fields))
    config.architectures = [f"{kind.removesuffix('Text')}ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def in_layout(layout: Layout, **changes: Any) -> Run:
    values: dict[str, Any] = {"out": "", "tokens": 1, "batch_tokens": 1, "context": 1, "precision": "fp32"}
    values |= {"model": {"config": {}}, "data": {"train": [""]}, **changes}
    return parse_run(values | {"layout": {axis: getattr(layout, axis) for axis in used(layout)}})


def proved(folder: Path, layout: Layout, processes: int = 8) -> Proof:
    result = prove(folder.name, [in_layout(layout)], read_decoder_config(folder), processes)
    assert result.passed, result.divergence
    for part in result.parts:
        assert set(part.errors) == {"float64", "float32"}
        assert part.errors["float64"] <= 1e-10
        assert part.errors["float32"] <= 1e-5
    return result


SWEEP = choose(ALL, 4)[0]
"""All pairs of axes, and the triples with experts, in four processes each."""
TRIPLE = Layout(dp_shard=2, cp=2, ep=2)
"""Divides rows, sequences and experts: the one of the sweep in the plain run."""


def test_the_sweep_holds_every_pair_of_axes() -> None:
    done = [set(used(layout)) for layout in SWEEP]
    pairs = [{one, other} for one in used(ALL) for other in used(ALL) if one < other]
    assert all(any(pair <= axes for axes in done) for pair in pairs)
    assert {"dp_shard", "tp", "ep"} in done


@pytest.mark.parametrize(
    "layout",
    [layout if layout == TRIPLE else pytest.param(layout, marks=pytest.mark.slow) for layout in SWEEP],
    ids=str,
)
def test_every_pair_of_axes_and_every_triple_with_experts(layout: Layout, tmp_path: Path) -> None:
    result = proved(config_folder("qwen3-moe", tmp_path), layout)
    assert [part.layout for part in result.parts] == [layout]
    assert result.extrapolated == ()


@pytest.mark.slow
def test_latent_attention_and_shared_experts_are_divided_by_heads(tmp_path: Path) -> None:
    """What all heads share has a gradient from each process's own."""
    proved(config_folder("deepseek-v3", tmp_path), Layout(tp=2), processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lfm2", "granite-hybrid-dense", "qwen3-next", "falcon-h1"])
def test_recurrent_mixers_are_divided_by_heads_and_channels(model: str, tmp_path: Path) -> None:
    """Granite's dense one has a single key for all heads; without positions a key's bias has no gradient to compare."""
    proved(config_folder(model, tmp_path, attention_bias=False), Layout(tp=2), processes=2)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gemma2", DENSE),  # soft caps, windows, tied
        ("gemma3", DENSE),  # two rotary embeddings, norms by head, offsets
        ("olmo2", DENSE),  # norms over all heads together
        ("llama-tied-biases", DENSE),
        ("llama-one-kv-head", Layout(dp_replicate=2, dp_shard=2, cp=2)),  # ring attention
        ("llama-one-kv-head", Layout(cp=8)),
        ("phi3-longrope", DENSE),  # an embedding that depends on the whole length
        ("llama-dynamic", Layout(dp_shard=2, cp=4, tp=2)),
        ("granite", DENSE),
        ("smollm3-window", DENSE),
        ("mixtral", Layout(dp_shard=4, cp=2, tp=2, ep=2)),
        ("olmoe", ALL),
        ("glm4-moe", ALL),  # a shared expert, shares by sigmoid
        ("deepseek-v2", DENSE),  # latent attention
        ("deepseek-v3", ALL),
        ("lfm2", RECURRENT),  # short convolutions
        ("lfm2-moe", Layout(dp_shard=2, tp=2, ep=2)),
        (
            "qwen3-next",
            Layout(dp_shard=2, tp=2, ep=2),
        ),  # the delta rule, gated attention, a gated shared expert
        ("qwen3.5", RECURRENT),
        ("granite-hybrid", Layout(dp_shard=2, tp=2, ep=2)),  # a state space with experts
        ("bamba", RECURRENT),
        ("falcon-h1", RECURRENT),  # a state space beside attention
        ("gpt-oss", ALL),  # sinks, experts with biases
        ("gemma4", Layout(dp_replicate=2, dp_shard=2, cp=2)),  # inputs of layers, keys of other layers
        ("gemma4-moe", Layout(dp_replicate=2, dp_shard=2, cp=2, ep=2)),
    ],
    ids=lambda value: str(value),
)
def test_families_in_all_pairs(model: str, layout: Layout, tmp_path: Path) -> None:
    proved(config_folder(model, tmp_path), layout, processes=max(4, layout.cp))


@pytest.mark.slow
@pytest.mark.sweep
def test_triples_in_eight_processes(tmp_path: Path) -> None:
    result = proved(config_folder("qwen3-moe", tmp_path), ALL)
    assert result.extrapolated == ("dp_replicate with dp_shard with cp with tp together",)


RUNS: dict[str, dict[str, Any]] = {
    "everything": {
        "layout": {"dp_shard": 2, "tp": 2},
        "micro_batches": 2,
        "recompute": "selective",
        "precision": "bf16",
        "compile": True,
    },
    "experts": {"layout": {"dp_shard": 2, "ep": 2}, "micro_batches": 2, "recompute": "full", **EXPERTS},
    "muon": {"layout": {"dp_replicate": 2}, "optimizer": {"name": "muon"}, "precision": "bf16"},
    "muon, shared out": {"layout": {"dp_shard": 2, "tp": 2}, "optimizer": {"name": "muon"}},
    "muon, experts shared out": {
        "layout": {"dp_shard": 2, "ep": 2},
        "optimizer": {"name": "muon"},
        **EXPERTS,
    },
    "muon in copies of shards": {
        "layout": {"dp_replicate": 2, "dp_shard": 2},
        "optimizer": {"name": "muon"},
        "precision": "bf16",
    },
    "adafactor": {"layout": {"dp_replicate": 2}, "optimizer": {"name": "adafactor"}},
    "adafactor, shared out": {"layout": {"dp_shard": 2, "cp": 2}, "optimizer": {"name": "adafactor"}},
    "adafactor in stages": {
        "layout": {"pp": 2, "dp_shard": 2},
        "micro_batches": 2,
        "optimizer": {"name": "adafactor"},
        **UNTIED,
    },
    "key-value heads of several processes": {"layout": {"dp_shard": 2, "tp": 4}, **SHARED_HEADS},
    "one key-value head with tp and cp": {"layout": {"tp": 2, "cp": 2}, "precision": "bf16", **ONE_KEY_HEAD},
    "mxfp8 with one key-value head": {"layout": {"tp": 2}, "precision": "mxfp8", **ONE_KEY_HEAD},
    "adamw8bit": {"layout": {"dp_shard": 2}, "optimizer": {"name": "adamw8bit"}},
    "float8": {"layout": {"dp_shard": 2}, "precision": "float8_rowwise"},
    "float8 with tp": {"layout": {"dp_shard": 2, "tp": 2}, "precision": "float8_tensorwise"},
    "float8 gathered by rows in stages": {
        "layout": {"pp": 2, "dp_shard": 2},
        "micro_batches": 2,
        "precision": "float8_rowwise",
        "gather": "float8",
        "recompute": "full",
        **UNTIED,
    },
    "mxfp8": {"layout": {"dp_replicate": 2}, "precision": "mxfp8"},
    "mxfp8 with tp": {"layout": {"dp_shard": 2, "tp": 2}, "precision": "mxfp8"},
    "mxfp8 experts with ep and tp": {
        "layout": {"dp_shard": 2, "ep": 2, "tp": 2},
        "precision": "mxfp8",
        **EXPERTS,
    },
    "mxfp4 experts with ep": {"layout": {"dp_shard": 2, "ep": 2}, "precision": "mxfp4", **EXPERTS},
    "float8 with ep": {"layout": {"cp": 2, "ep": 2}, "precision": "float8_rowwise", **EXPERTS},
    "documents": {"layout": {"dp_shard": 2, "cp": 2}, "micro_batches": 2, **DOCUMENTS},
    "documents in a ring": {"layout": {"cp": 4}, **DOCUMENTS, **ONE_KEY_HEAD},
    "documents in stages": {"layout": {"pp": 2, "cp": 2}, "micro_batches": 2, **DOCUMENTS, **UNTIED},
    "qat": {"layout": {"cp": 2}, "precision": "fp32", "qat": {"scheme": "w4a8"}},
    "one process": {"micro_batches": 2, "clip": False, "recompute": "full"},
}


@pytest.mark.parametrize(
    "name", [name if name == "one process" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_run_file_is_proved_with_all_it_says(name: str, tmp_path: Path) -> None:
    path = make_run(tmp_path, **{"micro_batches": 1, **RUNS[name]})
    run = read_run(path)
    around = functools.partial(seeded, "none")
    result = prove(name, [run], read_model(run, tmp_path), around=around)
    assert result.passed, result.divergence
    (part,) = result.parts
    assert part.layout == run.parallel
    assert part.errors["float64"] <= 1e-10


def test_a_layout_that_fits_runs_at_its_real_degrees() -> None:
    for text in ("cp=4", "dp_shard=8", "dp_shard=2,tp=3", "dp_replicate=2,cp=2,tp=2"):
        layout = Layout.parse(text)
        assert choose(layout, 8) == ([layout], ())


def test_what_is_extrapolated_is_said() -> None:
    runs, said = choose(Layout(cp=16), 8)
    assert (runs, said) == ([Layout(cp=8)], ("cp=16 (ran at 8)",))
    runs, said = choose(DENSE, 4)
    assert len(runs) == 6
    assert all(run.processes == 4 for run in runs)
    assert len(said) == 4
    assert choose(DENSE, 16) == ([DENSE], ())
    runs, said = choose(Layout(dp_shard=8, tp=4), 8)
    assert Layout(dp_shard=8) in runs
    assert Layout(tp=4) in runs
    assert Layout(dp_shard=2, tp=2) in runs
    assert said == ("all axes together at their degrees: dp_shard=8,tp=4",)
    with pytest.raises(LayoutError, match="fits into 1"):
        choose(DENSE, 1)


def test_the_small_model_keeps_what_the_layout_divides(tmp_path: Path) -> None:
    config = read_decoder_config(config_folder("gemma3", tmp_path / "gemma"))
    run = in_layout(Layout(dp_shard=8, tp=2, cp=4))
    small = shrink(run, config, Layout(tp=2, cp=4)).config
    assert len({(rope, window) for rope, window in zip(small.ropes, small.windows, strict=True)}) == 2
    assert small.groups == config.groups
    # One key-value head for each process of tp, and four processes of cp: a ring, in the small model as well.
    assert (small.kv_heads // 2) % 4 != 0
    assert shrink(run, config, Layout(cp=4)).config.kv_heads % 4 != 0
    exchanged = in_layout(Layout(cp=2))
    assert shrink(exchanged, config, Layout(cp=2)).config.kv_heads % 2 == 0
    experts = read_decoder_config(config_folder("qwen3-moe", tmp_path / "moe"))
    small = shrink(in_layout(Layout(dp_shard=2, ep=2)), experts, Layout(dp_shard=2, ep=2)).config
    assert set(small.sparse) == {True, False}
    assert small.experts
    assert small.experts.count % 2 == 0


SMOL = CONFIG | {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 72,
    "intermediate_size": 96,
}
"""Heads as in SmolLM2-135M, which only odd degrees of tp divide."""


@pytest.mark.parametrize("degree", range(2, 9))
def test_a_small_row_divides_over_every_degree(degree: int) -> None:
    config = decoder_config(SMOL, "the test")
    for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
        layout = Layout.from_degrees({axis: degree})
        small = shrink(in_layout(layout), config, layout)
        assert small.run.context % (2 * layout.cp * layout.tp) == 0
        assert small.run.batch_tokens % (small.run.context * layout.batch_ways) == 0
        assert small.config.heads % layout.tp == small.config.kv_heads % layout.tp == 0
        check_run(small.run)


ODD = [
    "cp=3",
    "tp=3",
    "cp=5",
    "cp=6",
    "cp=7",
    "dp_shard=3",
    "dp_shard=5",
    "dp_replicate=3",
    "dp_shard=3,cp=2",
]


@pytest.mark.slow
@pytest.mark.parametrize("text", ODD)
def test_odd_degrees_are_proved(text: str) -> None:
    layout = Layout.parse(text)
    result = prove("odd", [in_layout(layout)], decoder_config(SMOL, "the test"))
    assert result.passed, result.divergence
    assert result.parts[0].layout == layout


def test_nothing_to_prove_is_refused(tmp_path: Path) -> None:
    folder = config_folder("llama", tmp_path)
    with pytest.raises(LayoutError, match="nothing to prove"):
        prove_layout(folder, Layout())
    with pytest.raises(LayoutError, match="4 query heads"):
        prove_layout(folder, Layout(tp=8))
    grouped = config_folder("olmo2", tmp_path / "olmo2")
    with pytest.raises(LayoutError, match="normed all together"):
        prove_layout(grouped, Layout(tp=4))


@pytest.mark.slow
def test_command_proves_a_run_file_as_json_and_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path, layout={"cp": 2})
    assert main(["prove", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"]
    assert said["divergence"] is None
    assert [run["layout"]["cp"] for run in said["runs"]] == [2]
    assert said["runs"][0]["errors"]["float64"] < 1e-10


@pytest.mark.parametrize("words", [["RUN.toml", "--layout", "cp=2"], ["folder"]])
def test_command_takes_a_run_file_or_a_model_with_a_layout(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", *words]) == 2
    assert "layout" in capsys.readouterr().err


def test_command_names_the_fault_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = in_layout(Layout(cp=2))
    folder = config_folder("llama", tmp_path)
    wrong = LayoutProof(
        layout=Layout(cp=2),
        compiled=False,
        errors={"float64": 1.0, "float32": float("inf")},
        worst={"float64": "loss"},
        passed=False,
        seconds=1.0,
    )
    found = Divergence(
        tensor="forward/layers.0.mlp.down",
        dtype="float64",
        error=1.0,
        ratio=2.0,
        axis="cp",
        layer="layers.0.mlp.down",
        cause="a mean missing on cp",
    )

    def fake(
        name: str, ways: object, full: Any, processes: int, *, announce: Any, around: object = None
    ) -> Proof:
        announce(wrong)
        return Proof(model=name, run=run, config=full, parts=(wrong,), divergence=found, extrapolated=())

    monkeypatch.setattr(proof, "prove", fake)
    assert main(["prove", str(folder), "--layout", "cp=2"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "wrong" in said
    assert "first difference: forward/layers.0.mlp.down (float64, relative error 1.0e+00)" in said
    assert "likely cause: 2.000x: a mean missing on cp, in layers.0.mlp.down" in said
    assert main(["prove", str(folder), "--layout", "cp=2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["runs"][0]["errors"]["float32"] is None


def test_command_says_what_it_did_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = LayoutProof(
        layout=Layout(cp=8), compiled=True, errors={"float64": 1e-16}, worst={}, passed=True, seconds=1.0
    )
    folder = config_folder("llama", tmp_path)
    config = shrink(in_layout(Layout(cp=8)), read_decoder_config(folder), Layout(cp=8)).config
    whole = Proof(
        model="m",
        run=in_layout(Layout(cp=16), compile=True),
        config=config,
        parts=(part,),
        divergence=None,
        extrapolated=("cp=16 (ran at 8)",),
    )
    console().print(render.line(part), render.verdict(whole))
    said = " ".join(capsys.readouterr().out.split())
    assert "parts of cp=16, compile compute what one process computes: cp=8" in said
    assert "not run, and taken to follow: cp=16 (ran at 8)" in said


def test_a_pipelines_schedule_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = in_layout(Layout(pp=2), micro_batches=2, pipeline={"schedule": "zbv"})
    part = LayoutProof(layout=Layout(pp=2), compiled=False, errors={}, worst={}, passed=True, seconds=1.0)
    config = read_decoder_config(config_folder("llama", tmp_path))
    found = Proof(model="m", run=run, config=config, parts=(part,), divergence=None, extrapolated=())
    console().print(render.verdict(found))
    assert "pp=2, micro_batches=2, zbv computes what one process computes" in " ".join(
        capsys.readouterr().out.split()
    )


def test_command_refuses_a_layout_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(config_folder("llama", tmp_path)), "--layout", "cp=two"]) == 2
    assert "AXIS=NUMBER" in capsys.readouterr().err
