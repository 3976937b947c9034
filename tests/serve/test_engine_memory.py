"""How many pages the engine gets from how much memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchwright.core.errors import TorchwrightError
from torchwright.hardware.devices.cpu import available_memory_bytes
from torchwright.models.decoder import PAGE, PagedCache, read_decoder_config
from torchwright.serve.engine.memory import is_out_of_memory, page_bytes, page_count
from torchwright.serve.engine.process import ServedDecoder, serve
from torchwright.serve.wire.messages import OUT_OF_MEMORY
from torchwright.workloads.language import BUNDLED

CONFIG = read_decoder_config(BUNDLED)
SIZE = page_bytes(CONFIG, torch.bfloat16)
WHOLE = CONFIG.context // PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_page_has_the_bytes_that_the_cache_takes(dtype: torch.dtype) -> None:
    cache = PagedCache(CONFIG, pages=3, dtype=dtype)
    tensors = [t for layer in cache.layers for t in (layer.k, layer.v, layer.k_scale, layer.v_scale)]
    assert 3 * page_bytes(CONFIG, dtype) == sum(t.nbytes for t in tensors if t is not None)


@pytest.mark.parametrize(
    ("options", "pages"),
    [
        ({"kv_memory": 10 * SIZE + 5}, 10),
        ({"kv_memory": 10**15}, 4 * WHOLE),
        ({"available": 20 * SIZE}, 10),
        ({"available": int(1.2 * WHOLE * SIZE)}, WHOLE),
        ({"available": int(1.05 * WHOLE * SIZE)}, int(1.05 * WHOLE * SIZE / 2) // SIZE),
        ({"available": 10**15}, 4 * WHOLE),
    ],
)
def test_pages(options: dict[str, int], pages: int) -> None:
    found = page_count(CONFIG, torch.bfloat16, context=CONFIG.context, max_running=4, **options)
    assert found == pages


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(TorchwrightError, match=f"--kv-memory {WHOLE * SIZE}"):
        page_count(CONFIG, torch.bfloat16, context=CONFIG.context, max_running=4, kv_memory=SIZE - 1)


def test_there_is_some_memory_here() -> None:
    assert available_memory_bytes() > 1 << 20


@pytest.mark.parametrize(
    "ask", [lambda: torch.empty(1 << 60), lambda: bytearray(1 << 60)], ids=["torch", "python"]
)
def test_a_lack_of_memory_is_known_by_what_allocators_raise(ask: Callable[[], object]) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as found:
        ask()
    assert is_out_of_memory(found.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_an_engine_without_memory_ends_with_its_own_exit_code() -> None:
    engine: Any = SimpleNamespace(grammars=None, idle=False, step=lambda: torch.empty(1 << 60))
    channel: Any = SimpleNamespace(receive=lambda wait_ms: (), send=lambda message: None)
    ready: Any = None
    assert serve(ServedDecoder(engine, ready), channel) == OUT_OF_MEMORY
