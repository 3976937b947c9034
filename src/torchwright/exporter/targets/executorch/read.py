# pyright: basic, reportMissingImports=false
"""A .pte read again: its operators in order, each with its kind, constants and scales, by the layer that it is of."""

from __future__ import annotations

import hashlib
import json
import operator
import re
import tempfile
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torchwright.core.json_file import parse_json, read_json, typed
from torchwright.exporter.verification.reference import module_of

LAYERS = "layers.json"
"""The file of `Layers`, next to the program."""
UNKNOWN = "an unnamed module"
NO_NUMBER = re.compile(rb": ([+-]?(?:inf|nan))\b")
"""Output of the schema compiler that is not JSON: open bounds of activations."""
ROLES = {"filter_id": "weight", "bias_id": "bias"}


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Whose operators they are, of which the program keeps numbers alone."""

    handles: dict[str, str]
    """Path of the module, by the number that an operator has within a delegate."""
    instructions: dict[str, str]
    """The same by the place of a call in the program."""


def write_layers(folder: Path, lowered: Any) -> None:
    """Keep the modules of a lowered program's operators."""
    handles: dict[str, str] = {}
    instructions: dict[str, str] = {}
    module = lowered.exported_program().graph_module
    for node in module.graph.nodes:
        number = node.meta.get("debug_handle")  # of a call its place, since the program was written
        if node.op == "call_function" and node.target is not operator.getitem and number is not None:
            instructions[str(number)] = module_of(node)
        part: Any = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        for inner in part.original_module.graph.nodes if hasattr(part, "original_module") else ():
            if isinstance(number := inner.meta.get("debug_handle"), int) and inner.op == "call_function":
                handles.setdefault(str(number), module_of(inner))
    layers = Layers(handles=handles, instructions=instructions)
    (folder / LAYERS).write_text(json.dumps(asdict(layers)), encoding="utf-8")


def contents(file: Path) -> dict[str, Any]:
    """ "module, operator N: what" → value, in the program's order; of constants their digests."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    layers = typed(read_json(file.with_name(LAYERS)), Layers, LAYERS)
    whole = deserialize_pte_binary(file.read_bytes())
    program, found = whole.program, {}
    plan = next(plan for plan in program.execution_plan if plan.name == "forward")
    constants = [buffer.storage for buffer in program.constant_buffer]
    for index, value in enumerate(plan.inputs):
        tensor = plan.values[value].val
        found[f"the model itself, input {index}: sizes"] = list(getattr(tensor, "sizes", ()))
    for place, instruction in enumerate(plan.chains[0].instructions):
        call = instruction.instr_args
        module = layers.instructions.get(str(place), UNKNOWN)
        if hasattr(call, "op_index"):
            kernel = plan.operators[call.op_index]
            found[f"{module}, operator {place}: kind"] = f"{kernel.name}.{kernel.overload}".rstrip(".")
            for argument, value in enumerate(call.args):
                found |= _argument(f"{module}, operator {place}: argument {argument}", plan, value, constants)
        elif hasattr(call, "delegate_index"):
            delegate = plan.delegates[call.delegate_index]
            payload = program.backend_delegate_data[delegate.processed.index].data
            if delegate.id == "XnnpackBackend":
                found |= _xnnpack(payload, whole.named_data, place, layers)
            else:
                found[f"{module}, operator {place}: {delegate.id}"] = _digest(payload)
    return found


def _argument(name: str, plan: Any, index: int, constants: list[bytes]) -> dict[str, Any]:
    """Return a kernel's constant arguments, as far as the program has them."""
    value = plan.values[index].val
    if place := getattr(value, "data_buffer_idx", 0):
        return {name: _digest(constants[place])} if place < len(constants) else {}
    for kind in ("int_val", "double_val", "bool_val", "string_val", "items"):
        if hasattr(value, kind):
            return {name: getattr(value, kind)}
    return {}


def _xnnpack(payload: bytes, named: Any, place: int, layers: Layers) -> dict[str, Any]:
    """The operators of one delegate's graph."""
    from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader

    header = XNNHeader.from_bytes(payload[: XNNHeader.EXPECTED_LENGTH])
    flat = payload[header.flatbuffer_offset :][: header.flatbuffer_size]
    graph = _graph(flat)
    inside = payload[header.constant_data_offset :]
    values = {_tensor(value)["id_out"]: value["xvalue_union"] for value in graph["xvalues"]}

    def constant(index: int) -> str:
        entry = graph["constant_data"][index]
        if key := entry["named_key"]:
            return _digest(named.buffers[named.pte_data[key].buffer_index])
        return _digest(inside[entry["offset"] :][: entry["size"]])

    found: dict[str, Any] = {}
    name = f"{UNKNOWN}, operator {place}"
    for index, node in enumerate(graph["xnodes"]):
        module = layers.handles.get(str(node["debug_handle"]), UNKNOWN)
        name = f"{module}, operator {place}.{index}"
        found[f"{name}: kind"] = node["xnode_union_type"]
        for role, number in node["xnode_union"].items():
            if not role.endswith("_id") or number not in values:
                found[f"{name}: {role}"] = number
                continue
            role, value = ROLES.get(role, role.removesuffix("_id")), values[number]
            tensor = value.get("tensor_value", value)
            if buffer := tensor["constant_buffer_idx"]:
                found[f"{name}: {role}"] = constant(buffer)
            for what, said in value.get("quant_params", {}).items():
                if what.endswith("buffer_idx"):
                    found[f"{name}: {role}, scales"] = constant(said)
                elif what != "num_scales" and said != []:
                    found[f"{name}: {role}, {what}"] = said
        for bound, said in (node.get("output_min_max") or {}).items():
            found[f"{name}: {bound}"] = said
    # Small numbers are printed with few digits.
    return found | {f"{name}: anything else": _digest(flat)}


def _tensor(value: Any) -> Any:
    inner = value["xvalue_union"]
    return inner.get("tensor_value", inner)


def _graph(content: bytes) -> Any:
    """XNNPACK's own graph as JSON, by the compiler of schemas that ExecuTorch brings."""
    from executorch.backends.xnnpack import serialization
    from executorch.exir._serialize._flatbuffer import _flatc_decompile

    with tempfile.TemporaryDirectory() as folder:
        schema, data = Path(folder, "schema.fbs"), Path(folder, "data.bin")
        schema.write_bytes(resources.files(serialization).joinpath(schema.name).read_bytes())
        data.write_bytes(content)
        _flatc_decompile(folder, str(schema), str(data), ["--raw-binary"])
        text = NO_NUMBER.sub(rb': "\1"', data.with_suffix(".json").read_bytes())
    return parse_json(text, "a delegate's graph")


def _digest(content: Any) -> str:
    return hashlib.sha256(bytes(content)).hexdigest()[:16]
