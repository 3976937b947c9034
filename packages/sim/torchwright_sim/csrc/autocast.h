// Autocast: the operators that PyTorch runs in lower precision, in float32, or in the widest type on every accelerator.

#pragma once

#include <ATen/autocast_mode.h>

// The lists name types without their namespace.
namespace at::autocast {
namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_LOWER_PRECISION_FP(LOWER)
    AT_FORALL_FP32(FLOAT32)
    AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_DTYPE)
    AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
    AT_FORALL_PROMOTE(PROMOTE)
#undef LOWER
#undef FLOAT32
#undef FLOAT32_DTYPE
#undef PROMOTE
}

} // namespace
} // namespace at::autocast
