"""Requests about the engine as a whole, in SGLang's names: other weights, a pause, requests to end, an empty cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from torchwright.serve.openai.parse import Body
from torchwright.serve.wire.messages import PauseMode

Version = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")]
_NO_DEVICE_CACHE = "memory of a device is not cached here"


class FlushCacheRequest(Body):
    """POST /flush_cache"""

    without_effect: ClassVar[dict[str, str]] = {"empty_cache": _NO_DEVICE_CACHE}
    defaults: ClassVar[dict[str, Sequence[Any]]] = {"empty_cache": (True, False)}


class UpdateWeightsRequest(Body):
    """POST /update_weights_from_disk"""

    refused: ClassVar[dict[str, str]] = {
        "is_async": "the answer comes when the next step has the new weights",
        "flush_cache": "keys and values of other weights are never used",
        "token_step": "use weight_version",
        "manifest": "the files say what they hold",
    }
    without_effect: ClassVar[dict[str, str]] = {
        "torch_empty_cache": _NO_DEVICE_CACHE,
        "recapture_cuda_graph": "nothing is captured",
    }
    defaults: ClassVar[dict[str, Sequence[Any]]] = {
        "is_async": (False,),
        "flush_cache": (True,),
        "token_step": (0,),
        "torch_empty_cache": (False,),
        "recapture_cuda_graph": (False,),
    }

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A model's folder, or one safetensors file of all its tensors, below the folder of `--allow-weights`."""
    load_format: Literal["auto", "safetensors"] = "auto"
    """Weights are read from safetensors files in any case."""
    weight_version: Version | None = None
    """The weights' name in answers; by default their fingerprint."""
    abort_all_requests: bool = False
    """End running and waiting requests with what they have; otherwise they go on with the new weights."""
    keep_pause: bool = False
    """Generate nothing afterwards until /continue_generation."""


class NameWeightsRequest(Body):
    """POST /update_weight_version"""

    new_version: Version
    """The name of the weights in answers."""
    abort_all_requests: bool = True
    """End running and waiting requests with what they have."""


class PauseRequest(Body):
    """POST /pause_generation"""

    mode: PauseMode = "abort"
    """abort ends all requests with what they have; retract has them computed again later; in_place keeps their keys and
    values."""


class ContinueRequest(Body):
    """POST /continue_generation"""

    without_effect: ClassVar[dict[str, str]] = {"torch_empty_cache": _NO_DEVICE_CACHE}
    defaults: ClassVar[dict[str, Sequence[Any]]] = {"torch_empty_cache": (True, False)}


class AbortRequest(Body):
    """POST /abort_request"""

    rid: Annotated[str, Field(max_length=256)] = ""
    """The id of a request: its `rid`, or the id in its answer."""
    abort_all: bool = False
    """End all requests that generate."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.rid) == self.abort_all:
            raise PydanticCustomError("one_of", "give rid, or abort_all: true")
        return self
