"""Which operators of OpenVINO's graph are marked to stay in float32: the text alone, where it is not installed too."""

from __future__ import annotations

from collections.abc import Collection
from xml.etree import ElementTree

import pytest

from torchwright.optimization.engines.rewrites.openvino_graph import check_ir, keep_float32


def net(*layers: str, inside: str = "") -> bytes:
    """An IR of layers as `name Type source source …`, in the order of computation."""
    parts, edges = [], []
    ids = {layer.split()[0]: index for index, layer in enumerate(layers)}
    for layer in layers:
        name, kind, *sources = layer.split()
        body = f"<body>{inside}</body>" if kind == "Loop" else ""
        tag = f'layer id="{ids[name]}" name="{name}" type="{kind}" version="opset1"'
        output = '<output><port id="0" precision="FP32"><dim>2</dim></port></output>'
        parts.append(f'<{tag}><data offset="0" size="0"/>{output}{body}</layer>')
        edges += [
            f'<edge from-layer="{ids[source]}" from-port="0" to-layer="{ids[name]}" to-port="0"/>'
            for source in sources
        ]
    return f"<net><layers>{''.join(parts)}</layers><edges>{''.join(edges)}</edges></net>".encode()


def marked(text: bytes, *, autocast: bool, kept: Collection[str] = ()) -> set[str]:
    found = keep_float32(text, autocast=autocast, kept=kept)
    check_ir(found, 0)
    layers = ElementTree.fromstring(found).iter("layer")
    return {
        layer.get("name", "")
        for layer in layers
        if layer.find("rt_info/attribute[@name='precise']") is not None
    }


STEPS = [
    "t Parameter",
    "c Const",
    "whole Convert t",
    "angle Multiply whole c",
    "sin Sin angle",
    "cos Cos angle",
    "both Concat sin cos",
    "embed MatMul both c",
    "out Result embed",
]


def test_what_sines_are_computed_of_stays_and_what_reads_them_does_not() -> None:
    assert marked(net(*STEPS), autocast=False) == {"whole", "angle", "sin", "cos"}
    assert marked(net(*STEPS), autocast=True) == {"whole", "angle", "sin", "cos"}


def test_products_end_what_is_kept_for_a_sine() -> None:
    layers = [
        "x Parameter",
        "w Const",
        "up Multiply x w",
        "angle MatMul up w",
        "turned Add angle w",
        "sin Sin turned",
    ]
    assert marked(net(*layers), autocast=False) == {"turned", "sin"}


BLOCK = [
    "x Parameter",
    "w Const",
    "norm MVN x",
    "scaled Multiply norm w",
    "q MatMul scaled w",
    "biased Add q w",
    "heads Reshape biased",
    "turned Transpose heads",
    "attention ScaledDotProductAttention turned turned turned",
    "back Reshape attention",
    "down MatMul back w",
    "sum Add x down",
    "up MatMul sum w",
    "bent Gelu up",
    "last MatMul bent w",
    "shown Sigmoid last",
    "out Result shown",
]


def test_by_autocast_what_is_added_up_stays_and_what_goes_from_product_to_product_does_not() -> None:
    assert marked(net(*BLOCK), autocast=False) == set()
    assert marked(net(*BLOCK), autocast=True) == {"norm", "scaled", "biased", "sum", "shown"}


def test_layers_that_are_left_alone_stay_with_what_they_alone_read() -> None:
    """A product is read through an operator of its own; constants of its name are none."""
    layers = [line.replace("down MatMul", "down/at/MatMul MatMul") for line in BLOCK]
    layers = [line.replace("sum Add x down", "sum Add x down/at/MatMul") for line in layers]
    layers.insert(2, "down/at/Constant Const")
    found = marked(net(*layers), autocast=True)
    alone = marked(net(*layers), autocast=True, kept={"down", "norm"})
    assert alone == found | {"down/at/MatMul", "down/at/MatMul/same", "back"}


def test_a_product_that_is_left_alone_is_read_through_the_larger_of_it_and_itself() -> None:
    text = keep_float32(
        net("x Parameter", "w Const", "up MatMul x w", "sum Add up w"), autocast=True, kept={"up"}
    )
    (layers, edges) = ElementTree.fromstring(text)
    names = {layer.get("id"): layer.get("type") for layer in layers}
    read = [(names[edge.get("from-layer")], names[edge.get("to-layer")]) for edge in edges]
    assert sorted(read) == [
        ("Const", "Add"),
        ("Const", "MatMul"),
        ("MatMul", "Maximum"),
        ("MatMul", "Maximum"),
        ("Maximum", "Add"),
        ("Parameter", "MatMul"),
    ]


def test_what_is_read_by_a_sum_too_stays() -> None:
    layers = [
        "x Parameter",
        "w Const",
        "up MatMul x w",
        "bent ReLU up",
        "down MatMul bent w",
        "sum Add down bent",
    ]
    assert marked(net(*layers), autocast=True) == {"bent", "sum"}


@pytest.mark.parametrize("autocast", [False, True])
def test_graphs_within_graphs_are_marked_too(autocast: bool) -> None:
    inside = (
        net("y Parameter", "turn Sin y", "end Result turn")
        .decode()
        .removeprefix("<net>")
        .removesuffix("</net>")
    )
    found = marked(net("x Parameter", "again Loop x", "out Result again", inside=inside), autocast=autocast)
    assert found == ({"turn", "again"} if autocast else {"turn"})


def test_a_second_marking_changes_nothing() -> None:
    once = keep_float32(net(*BLOCK), autocast=True)
    assert keep_float32(once, autocast=True) == once
