# pyright: basic, reportMissingImports=false
"""An OpenVINO graph on 8-bit weights and activations: NNCF's quantization, with weights rounded by ourselves."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchwright.core.errors import RefusedTechnique
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of
from torchwright.optimization.engines.dispatch.spec import CallSpec
from torchwright.optimization.engines.rewrites.openvino_rounding import round_weights
from torchwright.optimization.techniques.shared.int8 import largest_weight

if TYPE_CHECKING:
    from torchwright.optimization.techniques.base import Target

ATTENTION = ("ScaledDotProductAttention", "Softmax")
"""Operators of OpenVINO's that show a transformer."""


def quantized(
    model: Any, spec: CallSpec, target: Target, modules: dict[str, str], skip: tuple[str, ...]
) -> Any:
    """8-bit weights and activations, their ranges from the workload's calibration calls.

    NNCF places the quantizations. In transformers it scales the inputs of layers (SmoothQuant) and corrects the biases:
    MiniLM's graph lost 6.5% of its output so, and 7.8% by `round_weights`, which other models have.
    """
    import nncf
    from openvino._offline_transformations import compress_quantize_weights_transformation

    arrays = [
        [tensor.contiguous().numpy() for tensor in tensors_of(case)]
        for case in target.workload.calibration(target.compute_dtype)
    ]
    # Ranges come from any batch size, also from one, which a graph with a dynamic batch size was not exported for.
    shape = replace(spec, sizes={})
    given = [call for call in arrays if shape.bind([array.shape for array in call]) is not None]
    if not given:
        raise RefusedTechnique("no calibration input has the sizes of the call")
    ignored = [f"^{re.escape(name)}/.*" for name, module in modules.items() if module in skip]
    attention = any(operator.get_type_name() in ATTENTION for operator in model.get_ops())
    narrow = nncf.quantize(
        model.clone(),
        nncf.Dataset(given, lambda call: dict(enumerate(call))),
        subset_size=len(given),
        model_type=nncf.ModelType.TRANSFORMER if attention else None,
        ignored_scope=nncf.IgnoredScope(patterns=ignored, validate=False) if ignored else None,
        advanced_parameters=_parameters(target, transformer=attention),
    )
    if not attention:
        round_weights(narrow, given)
        compress_quantize_weights_transformation(narrow)
    return narrow


def _parameters(target: Target, *, transformer: bool) -> Any:
    """Return NNCF's parameters.

    `round_weights` corrects the biases, and needs the weights before rounding. Weights have 8 bits where the processor
    sums 8-bit products exactly. Elsewhere, without VNNI, two products overflow 16 bits, and weights have 7. By default
    NNCF narrows the first layer alone: EfficientNet-Lite0 lost 11.6% so on AVX2, and 2.5% with 7 bits for all.

    Activations have one range, also those that a depthwise convolution reads, to which NNCF gives a range per channel:
    EfficientNet-Lite0 lost 21% of its output so, and 9% by one range, biases corrected.

    One example at two sizes has the larger one's ranges: the mean of all calls' maxima, NNCF's default, cuts a quarter
    of them off (an attention layer lost 20% in place of 5%).
    """
    from nncf import AdvancedQuantizationParameters, OverflowFix
    from nncf.openvino.quantization.backend_parameters import BackendParameters
    from nncf.quantization.advanced_parameters import QuantizationParameters
    from nncf.quantization.range_estimator import RangeEstimatorParametersSet

    given: dict[str, Any] = {}
    if not transformer:
        given["disable_bias_correction"] = True
        given["backend_params"] = {BackendParameters.COMPRESS_WEIGHTS: False}
        given["activations_quantization_params"] = QuantizationParameters(per_channel=False)
    given["overflow_fix"] = OverflowFix.DISABLE if largest_weight() == 127 else OverflowFix.ENABLE
    if target.workload.varied() is not None:
        given["activations_range_estimator_params"] = RangeEstimatorParametersSet.MINMAX
    return AdvancedQuantizationParameters(**given)
