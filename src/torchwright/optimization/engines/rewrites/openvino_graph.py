# pyright: basic
"""OpenVINO's intermediate representation as text: the contents allowed in an untrusted one, and operators kept in
float32.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any
from xml.etree import ElementTree

DEEPEST = 100
"""The limit on the depth of elements: graphs within graphs."""
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
"""The operators that a narrower type makes faster."""
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
"""The elementwise operators: OpenVINO computes them before a product's result is rounded."""
PERIODIC = frozenset({"Cos", "Sin"})
ENDS = frozenset({"Const", "Parameter", "Result"})
PRECISE = {"name": "precise", "version": "0"}
"""OpenVINO's own mark for an operator that keeps the type in which it is written."""


def keep_float32(text: bytes, *, autocast: bool, kept: Collection[str] = ()) -> bytes:
    """The graph with marks for what stays in float32 where a narrower type is asked for.

    Always what sines and cosines are computed of, which are numbers of steps and places: bfloat16 has nothing between
    980 and 984. With `autocast` all but products and what stands between two of them, as torch.autocast has it; and
    what was made of the operators `kept`, by their names in the exported graph.
    """
    root = ElementTree.fromstring(text)
    for graph in (root, *root.iter("body")):
        layers, edges = graph.find("layers"), graph.find("edges")
        if layers is None or edges is None:
            continue
        order = {layer.get("id", ""): layer for layer in layers}
        alone = _made_of(kept, order)
        wide = _of_periodic(order, edges) | alone
        if autocast:
            wide |= _but_products(order, edges, wide)
        for name in wide:
            _mark(order[name])
        for name in alone:
            if order[name].get("type") == "MatMul":
                _set_apart(order[name], layers, edges)
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


def _made_of(operators: Collection[str], layers: dict[str, Any]) -> set[str]:
    """Return OpenVINO's operators that were converted from operators of the exported graph: it names them `NAME/…`."""
    return {
        name
        for name, layer in layers.items()
        if layer.get("name", "").partition("/")[0] in operators and layer.get("type") not in ENDS
    }


def _but_products(layers: dict[str, Any], edges: Any, wide: set[str]) -> set[str]:
    """All but products that are not `wide`, and but what moves or bends one value for such products alone to read,
    which round it anyway."""
    readers = defaultdict[str, list[str]](list)
    for edge in edges:
        readers[edge.get("from-layer")].append(edge.get("to-layer"))
    narrow: set[str] = set()
    for name, layer in reversed(layers.items()):  # readers come after what they read
        read = readers[name]
        passing = layer.get("type") in LAYOUT | ACTIVATIONS and read and narrow.issuperset(read)
        if name not in wide and (passing or layer.get("type") in PRODUCTS):
            narrow.add(name)
    return {name for name, layer in layers.items() if name not in narrow and layer.get("type") not in ENDS}


def _mark(layer: Any) -> None:
    notes = layer.find("rt_info")
    if notes is None:
        notes = ElementTree.Element("rt_info")
        layer.insert(0 if layer.find("data") is None else 1, notes)
    if all(note.attrib != PRECISE for note in notes):
        ElementTree.SubElement(notes, "attribute", PRECISE)


def _set_apart(product: Any, layers: Any, edges: Any) -> None:
    """Let other nodes read a product through the larger of it and itself.

    OpenVINO makes one operator of a product and the constant added to it, on which the mark is lost (2026.4).
    """
    name, (output,) = product.get("id"), product.findall("output/port")
    new = str(1 + max(int(layer.get("id")) for layer in layers))
    same = ElementTree.Element(
        "layer", {"id": new, "name": f"{product.get('name')}/same", "type": "Maximum", "version": "opset1"}
    )
    ElementTree.SubElement(same, "data", {"auto_broadcast": "numpy"})
    for parent, ports in (
        (ElementTree.SubElement(same, "input"), "01"),
        (ElementTree.SubElement(same, "output"), "2"),
    ):
        for port in ports:
            copy = ElementTree.SubElement(parent, "port", {"id": port, "precision": output.get("precision")})
            copy.extend(ElementTree.fromstring(ElementTree.tostring(dim)) for dim in output.findall("dim"))
    _mark(same)
    layers.insert(list(layers).index(product) + 1, same)
    for edge in edges:
        if edge.get("from-layer") == name:
            edge.set("from-layer", new)
            edge.set("from-port", "2")
    for port in "01":
        ends = {"from-layer": name, "from-port": output.get("id"), "to-layer": new, "to-port": port}
        ElementTree.SubElement(edges, "edge", ends)


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
