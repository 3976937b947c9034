// The sources of one instruction set as one unit, and its table.
#include "attention.cpp"
#include "linear.cpp"
#include "linear_tiles.cpp"
#include "low_rank.cpp"
#include "pointwise.cpp"
#include "norm.cpp"
#include "quantize.cpp"
#include "encoder.cpp"
#include "dense_attention.cpp"
#include "conv.cpp"
#include "conv_pairs.cpp"
#include "recurrent.cpp"
#include "cells.cpp"

#define TW_STRING_(x) #x
#define TW_STRING(x) TW_STRING_(x)

namespace TW_ISA {
const tw::Kernels& table() {
  static const tw::Kernels all{
      .name = TW_STRING(TW_ISA),
      .quantize = quantize,
      .widen_row = widen_row,
      .linear_w8 = linear_w8,
      .linear_w4 = linear_w4,
      .linear_bf16 = linear_bf16,
      .linear_grouped = linear_grouped,
#if defined(TW_AMX)
      .linear_tiles = linear_tiles,
      .turn_rows = turn_rows,
#else
      .linear_tiles = nullptr,
      .turn_rows = nullptr,
#endif
      .attention = attention,
      .add_stretches = add_stretches,
      .norm = norm,
      .norm_backward = norm_backward,
      .gated = gated,
      .activate_row = activate_row,
      .rope_store = rope_store,
      .widen_peak = widen_peak,
      .quantize_w4 = quantize_w4,
      .quantize_centered = quantize_centered,
      .finish = finish,
      .turn_heads = turn_heads,
      .dense_attention = dense_attention,
      .convolve = convolve,
      .convolve_pairs = convolve_pairs,
      .convolve_depthwise = convolve_depthwise,
      .sum_pixels = sum_pixels,
      .average = average,
      .short_conv = short_conv,
      .recurrence_keys = recurrence_keys,
      .recur = recur,
      .gated_norm = gated_norm,
      .lstm_step = lstm_step,
      .gru_step = gru_step,
      .low_rank_shrink = low_rank_shrink,
      .low_rank_expand = low_rank_expand,
  };
  return all;
}
}  // namespace TW_ISA
