"""The calls by which a converter finds the ranges of activations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchwright.core.errors import RefusedTechnique
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of

if TYPE_CHECKING:
    from torchwright.optimization.engines.dispatch.spec import CallSpec
    from torchwright.optimization.techniques.base import Target
    from torchwright.workloads.base import Case


def calibrating(target: Target, spec: CallSpec) -> list[Case]:
    """Return the workload's calibration calls that have the sizes of the graph, with dicts and tuples for instances.

    Raises `RefusedTechnique` where none has.
    """
    import torch

    from torchwright.core import nested

    calls = [
        replace(case, args=args, kwargs=kwargs)
        for case in target.workload.calibration(torch.float32)
        if spec.bind([tensor.shape for tensor in tensors_of(case)]) is not None
        for args, kwargs in [nested.plain(nested.opened((case.args, case.kwargs)))]
    ]
    if not calls:
        raise RefusedTechnique("no calibration input has the sizes of the call")
    return calls
