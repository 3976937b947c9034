# pyright: basic
"""OpenVINO's intermediate representation as text: what a stranger's may hold, and which operators stay in float32."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

DEEPEST = 100
"""Of elements in it: graphs within graphs."""
OPSET = re.compile(r"opset[0-9]{1,2}")
"""Operators of these sets are OpenVINO's own; another set is an extension's."""
PRODUCTS = frozenset(
    {
        "MatMul",
        "ScaledDotProductAttention",
        "Convolution",
        "GroupConvolution",
        "ConvolutionBackpropData",
        "GroupConvolutionBackpropData",
    }
)
"""What a narrower type makes faster."""
LAYOUT = frozenset(
    {
        "Concat",
        "Gather",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "StridedSlice",
        "Transpose",
        "Unsqueeze",
        "VariadicSplit",
    }
)
ACTIVATIONS = frozenset({"Gelu", "HSwish", "ReLU", "Sigmoid", "Swish", "Tanh"})
"""Of one value each: OpenVINO computes them before a product's result is rounded."""
PERIODIC = frozenset({"Cos", "Sin"})
ENDS = frozenset({"Const", "Parameter", "Result"})
PRECISE = {"name": "precise", "version": "0"}
"""OpenVINO's own mark for an operator that keeps the type in which it is written."""


def keep_float32(text: bytes, *, autocast: bool) -> bytes:
    """The graph with marks for what stays in float32 where a narrower type is asked for.

    Always what sines and cosines are computed of, which are numbers of steps and places: bfloat16 has nothing between
    980 and 984. With `autocast` all but products and what stands between two of them, as torch.autocast has it.
    """
    root = ElementTree.fromstring(text)
    for graph in (root, *root.iter("body")):
        layers, edges = graph.find("layers"), graph.find("edges")
        if layers is None or edges is None:
            continue
        order = {layer.get("id", ""): layer for layer in layers}
        kept = _of_periodic(order, edges)
        if autocast:
            kept |= _between_products(order, edges)
        for name in kept:
            _mark(order[name])
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def _of_periodic(layers: dict[str, Any], edges: Any) -> set[str]:
    """Sines, cosines, and what computes their arguments."""
    sources = defaultdict[str, list[str]](list)
    for edge in edges:
        sources[edge.get("to-layer")].append(edge.get("from-layer"))
    found = {name for name, layer in layers.items() if layer.get("type") in PERIODIC}
    todo = list(found)
    while todo:
        for source in sources[todo.pop()]:
            if source not in found and layers[source].get("type") not in PRODUCTS | ENDS:
                found.add(source)
                todo.append(source)
    return found


def _between_products(layers: dict[str, Any], edges: Any) -> set[str]:
    """All but products, and but what moves or bends one value for products alone to read, which round it anyway."""
    readers = defaultdict[str, list[str]](list)
    for edge in edges:
        readers[edge.get("from-layer")].append(edge.get("to-layer"))
    narrow: set[str] = set()
    for name, layer in reversed(layers.items()):  # readers come after what they read
        read = readers[name]
        passing = layer.get("type") in LAYOUT | ACTIVATIONS and read and narrow.issuperset(read)
        if passing or layer.get("type") in PRODUCTS:
            narrow.add(name)
    return {name for name, layer in layers.items() if name not in narrow and layer.get("type") not in ENDS}


def _mark(layer: Any) -> None:
    notes = layer.find("rt_info")
    if notes is None:
        notes = ElementTree.Element("rt_info")
        layer.insert(0 if layer.find("data") is None else 1, notes)
    if all(note.attrib != PRECISE for note in notes):
        ElementTree.SubElement(notes, "attribute", PRECISE)


def check_ir(text: bytes, constants: int) -> None:
    """Raise `ValueError` for XML that is anything but a graph of OpenVINO's own operators over `constants` bytes."""
    if b"<!" in text or text.count(b"<?") > 1:
        raise ValueError("declarations in an IR")
    depth = 0
    parser: Any = ElementTree.XMLPullParser(("start", "end"))
    parser.feed(text)
    parser.close()
    for event, element in parser.read_events():
        depth += 1 if event == "start" else -1
        if depth > DEEPEST:
            raise ValueError(f"elements deeper than {DEEPEST} in an IR")
        if event == "end" and element.tag == "layer":
            _check_layer(element, constants)


def _check_layer(layer: Any, constants: int) -> None:
    if not OPSET.fullmatch(layer.get("version", "")):
        raise ValueError(
            f"an operator of {layer.get('version', 'no set')[:80]!r}, which is not OpenVINO's own"
        )
    data = layer.find("data")
    if layer.get("type") != "Const" or data is None:
        return
    offset, size = int(data.get("offset", -1)), int(data.get("size", -1))
    if offset < 0 or size < 0 or offset + size > constants:
        raise ValueError(f"a constant at {offset} of {size} bytes, of {constants} in all")
