"""verl's own client of SGLang against the server at argv[1], whose weights come from argv[2]; prints JSON.

It runs in an environment of its own with verl's code, aiohttp and requests. Of SGLang, which wants a device, verl's
client takes the form of its arguments alone; these stand in for it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import load_file

CLIENT = "verl.workers.rollout.sglang_rollout.http_server_engine"
EXAMPLES = Path(__file__).parents[2] / "examples" / "grpo"


@dataclass
class ServerArgs:
    """The fields of SGLang's that the client reads."""

    model_path: str = ""
    host: str = ""
    port: int = 0
    node_rank: int = 0
    api_key: str | None = None
    is_embedding: bool = False


@dataclass
class Tensors:
    """A request for new weights, as SGLang describes it."""

    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True


def client_module() -> None:
    """Import verl's client under its name, without what verl and SGLang import beside it."""
    stand_ins: dict[str, dict[str, Any]] = {
        "sglang.srt.entrypoints.EngineBase": {"EngineBase": object},
        "sglang.srt.entrypoints.http_server": {"launch_server": None},
        "sglang.srt.managers.io_struct": {"UpdateWeightsFromTensorReqInput": Tensors},
        "sglang.srt.server_args": {"ServerArgs": ServerArgs},
        "sglang.srt.utils": {"kill_process_tree": None},
    }
    for name, contents in stand_ins.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        vars(sys.modules[name]).update(contents)
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.submodule_search_locations is not None
    parts = CLIENT.split(".")
    for count in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    file = Path(found.submodule_search_locations[0]).joinpath(*parts[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(CLIENT, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[CLIENT] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


async def program(url: str, weights: Path, model: Path) -> dict[str, Any]:
    from with_verl import Adapter  # pyright: ignore[reportMissingImports]

    place = urlsplit(url)
    adapter = Adapter(
        folder=weights, model_path=str(model), host=place.hostname, port=place.port, max_attempts=1
    )
    ids = [5, 6, 7, 8]
    greedy = {"temperature": 0, "max_new_tokens": 8}

    async def draw() -> Any:
        return await adapter.generate(input_ids=ids, sampling_params=greedy, return_logprob=True)

    found: dict[str, Any] = {"models": await adapter.available_models(), "first": await draw()}
    await adapter.release_memory_occupation(tags=["kv_cache", "weights"])
    waiting = asyncio.create_task(draw())
    await adapter.resume_memory_occupation(tags=["weights"])
    changed = {name: tensor * 1.5 for name, tensor in load_file(model / "model.safetensors").items()}
    found["updated"] = await adapter.update_weights(changed.items(), "1")
    found["waits"] = not waiting.done()
    await adapter.resume_memory_occupation(tags=["kv_cache"])
    found["second"], found["flushed"] = await waiting, await adapter.flush_cache()
    found["aborted"] = await adapter.abort_request(abort_all=True)
    found["refused"] = {}
    base = super(Adapter, adapter)
    for name, call in {
        "tensors": adapter.update_weights_from_tensor(Tensors([b"a pickle"])),
        "release": base.release_memory_occupation(tags=["kv_cache"]),
    }.items():
        try:
            await call
        except Exception as error:
            found["refused"][name] = getattr(error, "status", str(error))
    return found


def main() -> None:
    sys.path.append(str(EXAMPLES))
    client_module()
    url, weights, model = sys.argv[1:]
    print(json.dumps(asyncio.run(program(url, Path(weights), Path(model)))))


if __name__ == "__main__":
    main()
