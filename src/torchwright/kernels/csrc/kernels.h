// The table that each instruction set fills, and the sizes of the packed layouts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tw {

constexpr int64_t PANEL = 64;   // output features per panel of packed weights
constexpr int64_t DEPTH = 64;   // input features are padded to a multiple of this
constexpr int64_t PAGE = 16;    // tokens per page of the KV cache
constexpr int64_t LARGEST_HEAD = 512;  // elements of an attention head
constexpr float SMALLEST_PEAK = 1e-36f;  // a row whose largest value is not beyond it becomes zeros: 127 / it overflows

enum class Type { f32, bf16, s8 };

// Rows of activations, quantized per row: value = scale · q.
struct QuantizedRows {
  int8_t* q;         // rows × depth, zero beyond the features
  float* scale;      // rows
  int32_t* sums;     // rows × (depth / group): Σ q over each group
  int64_t depth, group;
};

// Some rows against some panels of a packed linear layer.
struct LinearTask {
  const void* weight;      // packed
  const float* scale;      // per output feature (w8a8), else null
  const float* bias;       // per output feature, or null
  const void* rows;        // activations: int8 (QuantizedRows) or bfloat16, rows × depth
  const float* row_scale;  // w8a8, w4a8
  const int32_t* row_sums; // w8a8: one a row; w4a8: one a group
  const float* row_sums_f; // w4a16: one a group
  void* out;
  Type out_type;
  int64_t row_begin, row_end, panel_begin, panel_end;
  int64_t depth, group, features, out_stride;
};

struct AttentionTask {
  const void* q;
  Type q_type;              // f32 or bf16; the output's too
  const void *k, *v;        // pages of one layer
  const float *k_scale, *v_scale;
  Type kv_type;
  const int32_t* table;     // this sequence's pages
  int64_t first_query, queries, context;  // queries of this sequence: [first_query, first_query + queries)
  int64_t heads, kv_heads, head_size, kv_head;
  float scale, soft_cap;
  int64_t window;
  void* out;
};

struct Kernels {
  const char* name;
  void (*quantize)(const void* x, Type type, int64_t features, int64_t row, const QuantizedRows& to);
  void (*widen_rows)(const void* x, Type type, int64_t features, int64_t row, uint16_t* to, int64_t depth,
                     int64_t group, float* sums, bool paired);
  void (*linear_w8a8)(const LinearTask&);
  void (*linear_w4a8)(const LinearTask&);
  void (*linear_w4a16)(const LinearTask&);
  void (*linear_bf16)(const LinearTask&);
  void (*attention)(const AttentionTask&, int64_t query_begin, int64_t query_end);
  void (*rms_norm)(const void* x, const void* residual, const float* weight, void* out, void* sum, Type type,
                   int64_t features, int64_t row, float eps);
  void (*gated)(const void* x, void* out, Type type, int64_t features, int64_t row, bool silu);
  void (*rope_store)(const struct RopeTask&, int64_t token);
  void (*quantize_w4)(const float* weight, const float* importance, int64_t features, int64_t group,
                      const float* shrinks, int64_t count, int8_t* integers, uint16_t* scales);
};

struct RopeTask {
  const void* qkv;
  Type type;
  const float *cos, *sin;     // positions × rotated/2
  int64_t rotated;
  const int64_t *positions, *slots;
  void *k, *v;
  float *k_scale, *v_scale;
  Type kv_type;
  int64_t heads, kv_heads, head_size;
  const float *q_norm, *k_norm;  // per head size, or null
  float eps;
  void* q;
};

}  // namespace tw
