// The sources of one instruction set as one unit, and its table.
#include "attention.cpp"
#include "linear.cpp"
#include "pointwise.cpp"
#include "quantize.cpp"
#include "encoder.cpp"

#define TW_STRING_(x) #x
#define TW_STRING(x) TW_STRING_(x)

namespace TW_ISA {
const tw::Kernels& table() {
  static const tw::Kernels all{TW_STRING(TW_ISA), quantize,      widen_row, linear_w8, linear_w4,  linear_bf16,
                               linear_grouped,
                               attention,         add_stretches, rms_norm,  gated,     rope_store, quantize_w4,
                               quantize_centered, finish,   dense_attention};
  return all;
}
}  // namespace TW_ISA
