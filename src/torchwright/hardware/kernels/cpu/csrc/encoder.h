// What encoders do beside packed linear layers, shared by the operators and every instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace tw {

// What follows a linear layer, on a part of its output: out = activation(out + center · sum) + residual.
struct FinishTask {
  void* out;
  const float* centers;  // per row: what was taken from its activations before they were quantized
  const float* sums;     // per output feature, whole panels: the sum of its weights
  const void* residual;  // of out's shape and type, or null
  Type type;             // f32 or bf16
  Activation activation;
  int64_t stride;  // values between rows
};

// Queries and keys of a token with their rotary embedding, and its values: qkv (tokens, 3, heads, head_size) to `out`
// (tokens, 3, heads, padded), zeros beyond the features. A token's angles are of its own, one for each two features.
struct TurnTask {
  const void* qkv;
  void* out;
  Type type;  // f32 or bf16
  const float *cos, *sin;  // (tokens, head_size / 2)
  int64_t heads, head_size, padded;  // the last a multiple of 16, at most LARGEST_HEAD
};

// Attention of every query to every key, float32 or bfloat16. Strides are in values; those of the last dimension are one.
struct DenseAttentionTask {
  struct Side {
    const void* data;
    int64_t batch, head, token;
  };
  Side q, k, v;
  Type type;  // of all three and of out
  void* out;  // (batch, queries, heads, head_size)
  const void* mask;  // bool (true is seen) or float32 (added to the scores), or null
  bool mask_is_bool;
  int64_t mask_batch, mask_head, mask_query, mask_key;  // strides; zero where it is broadcast
  int64_t queries, keys, heads, head_size;
  float scale;

  // Where tokens are places of a grid, row after row: a query adds its products with a vector for how many rows, and
  // one for how many columns, a key lies after it. (head_size, 2 · extent - 1, zeros up to a step beyond the last
  // sixteen) from the farthest before to the farthest after; null without.
  const float *by_row, *by_column;
  int64_t height, width;

  static int64_t table_width(int64_t extent) { return 2 * extent - 1 + 16; }
};

}  // namespace tw
