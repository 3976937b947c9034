// The table that each instruction set fills, and the sizes of the packed layouts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tw {

constexpr int64_t PANEL = 64;   // output features per panel of packed weights
constexpr int64_t DEPTH = 64;   // input features are padded to a multiple of this
constexpr int64_t TILE_ROWS = 16, TILE_INPUTS = 32;  // of an AMX tile: rows, and inputs in bfloat16
constexpr int64_t PAGE = 16;    // tokens per page of the KV cache
constexpr int64_t LARGEST_HEAD = 576;  // elements of an attention head
constexpr int64_t STRETCH = 1024;  // keys of a sequence that share a softmax; stretches are added up in order

enum class Type { f32, bf16, s8, f16 };
// How numbers in groups lie: for the lanes of vectors, or 4-bit integers as tiles (linear_tiles.cpp). Short heads of
// tiles are scales in float16 and whole zeros, for integers whose offset is -zero · scale.
enum class Layout { lanes, tiles, short_tiles };
enum class Activation { none, relu, gelu, gelu_tanh, silu, relu6, sigmoid, hardswish, hardsigmoid, clamped_swiglu };

constexpr int64_t ROWS_AT_ONCE = 512;  // of activations, in one task
constexpr int64_t SUMMED = 32;   // input features that share one sum of quantized activations
constexpr int32_t DIGIT = 254;   // 16-bit activations are high · 254 + low, both within ±127
constexpr float LEVELS_8 = 127, LEVELS_16 = 254 * 127 + 126;
constexpr float SMALLEST_STEP = 1e-38f;  // rows whose step would not be beyond it become zeros

// Activations, quantized per token: value = scale · q, or scale · (254 · q + the next row's q) with two digits.
struct QuantizedRows {
  int8_t* q;         // tokens × digits rows of `depth`, zero beyond the features, `stride` bytes apart
  float* scale;      // tokens
  int32_t* sums;     // tokens × digits × (depth / SUMMED + 1): Σ q over each part, and over all
  int64_t depth, stride, digits;
};

// Bytes that a group has for each feature before its numbers: scale and offset (or zero) of integers, the exponent of
// 4-bit floats, the scale of 8-bit ones.
constexpr int64_t head_bytes(int64_t bits, bool floats, Layout layout = Layout::lanes) {
  return floats ? (bits == 4 ? 1 : 4) : layout == Layout::short_tiles ? 2 + 1 : 2 * 4;
}

// Bytes of a panel's group of kept numbers.
constexpr int64_t grouped_bytes(int64_t group, int64_t bits, bool floats, Layout layout = Layout::lanes) {
  return PANEL * (head_bytes(bits, floats, layout) + group * bits / 8);
}

// Some rows against some panels of a packed linear layer.
struct LinearTask {
  const void* weight;      // packed
  const float* scale;      // per output feature (w8, w4), else null
  const float* bias;       // per output feature, or null
  const void* rows;        // activations: int8 (QuantizedRows) or bfloat16
  const float* row_scale;  // w8, w4
  const int32_t* row_sums; // w8, w4
  void* out;
  Type out_type;
  int64_t row_begin, row_end, panel_begin, panel_end;  // rows are tokens
  int64_t depth, row_stride, digits, group, features, out_stride;  // row_stride in bytes
  int64_t bits;  // of grouped weights, which may be
  bool floats;
  Layout layout;
  int64_t columns;  // tokens in a tile of rows that `turn_rows` made: 16, or all where they are fewer
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
  bool causal;  // a query sees no key behind its own place; else all of the context
  const float* bias;  // (heads, 2 reach), or null: a score's, by the distance of key and query, 0 at `reach`
  int64_t reach;      // a multiple of four pages, and no context is longer
  const float* sinks;  // (heads,), or null: a score beside the keys', whose value is zero
  int64_t first_key, last_key;  // computed of the context, whole stretches
  float* sums;  // where a stretch's sums go, `sums_size` a row, to be added up later; or null
  void* out;

  int64_t sums_size() const { return head_size + 16; }  // the largest score and the weights' sum come last
};

// Sixteen output features of an adapter's second matrix.
struct LowRankBlock {
  const uint16_t* weight;  // bfloat16 (pairs, 16, 2)
  int64_t first, pairs;    // of the ranks that it is multiplied with
};

// One adapter's part of a linear layer, for the rows of a batch that it changes: y += B A x.
struct LowRankTask {
  const uint16_t* a;            // bfloat16 (ranks / 16, width / 2, 16, 2)
  const LowRankBlock* blocks;   // features / 16
  const uint16_t* x;            // bfloat16 rows of `width`
  uint16_t* y;                  // bfloat16 rows of `features`
  const int64_t* rows;          // which of them
  uint16_t* middle;             // A x, bfloat16 (count, ranks)
  int64_t count, width, features, ranks;
};

struct Kernels {
  const char* name;
  void (*quantize)(const void* x, Type type, int64_t features, int64_t row, const QuantizedRows& to);
  void (*widen_row)(const void* x, Type type, int64_t features, int64_t row, uint16_t* to, int64_t depth,
                    int64_t stride);
  void (*linear_w8)(const LinearTask&);
  void (*linear_w4)(const LinearTask&);
  void (*linear_bf16)(const LinearTask&);
  void (*linear_grouped)(const LinearTask&);
  // 4-bit integers in groups as the left operand of tiles, and their rows; null where there are no tiles.
  void (*linear_tiles)(const LinearTask&);
  void (*turn_rows)(const uint16_t* rows, int64_t stride, int64_t count, int64_t columns, int64_t steps, uint16_t* to);
  void (*attention)(const AttentionTask&, int64_t row_begin, int64_t row_end);
  void (*add_stretches)(const AttentionTask&, int64_t row_begin, int64_t row_end, int64_t stretches);
  void (*norm)(const struct NormTask&, int64_t row);
  void (*norm_backward)(const struct NormBackwardTask&, int64_t row_begin, int64_t row_end);
  void (*gated)(const void* x, void* out, Type type, int64_t features, int64_t row, Activation activation);
  void (*activate_row)(const void* x, void* out, Type type, int64_t features, int64_t row, Activation activation);
  void (*rope_store)(const struct RopeTask&, int64_t token);
  float (*widen_peak)(const void* x, Type type, float* out, int64_t count);
  void (*quantize_w4)(const float* weight, const float* importance, int64_t features, int64_t group, int8_t* integers,
                      int8_t* multipliers, float* scale);
  void (*quantize_centered)(const void* x, Type type, int64_t features, int64_t row, const QuantizedRows& to,
                            float* centers);
  void (*finish)(const struct FinishTask&, int64_t row_begin, int64_t row_end, int64_t from, int64_t to);
  void (*turn_heads)(const struct TurnTask&, int64_t token);
  void (*dense_attention)(const struct DenseAttentionTask&, int64_t batch, int64_t head, int64_t begin, int64_t end);
  void (*convolve)(const struct ConvTask&, int64_t row, int64_t x_begin, int64_t x_end, int64_t block_begin,
                   int64_t block_end);
  void (*convolve_pairs)(const struct ConvTask&, int64_t begin, int64_t end, int64_t block_begin, int64_t block_end);
  void (*convolve_depthwise)(const struct ConvTask&, int64_t row);
  void (*sum_pixels)(const struct ConvTask&, int64_t row, float* to);
  void (*average)(const struct ConvTask&, int64_t image, const float* sums);
  void (*short_conv)(const struct ShortConvTask&, int64_t sequence, int64_t begin, int64_t end);
  void (*recurrence_keys)(const struct RecurrenceKeys&, int64_t token);
  void (*recur)(const struct RecurrenceTask&, int64_t sequence, int64_t head, int64_t column);
  void (*gated_norm)(const struct GatedNormTask&, int64_t row);
  void (*lstm_step)(const struct CellTask&, int64_t step, int64_t row_begin, int64_t row_end, int64_t block_begin,
                    int64_t block_end);
  void (*gru_step)(const struct CellTask&, int64_t step, int64_t row_begin, int64_t row_end, int64_t block_begin,
                   int64_t block_end);
  void (*low_rank_shrink)(const LowRankTask&, int64_t row_begin, int64_t row_end, int64_t block);
  void (*low_rank_expand)(const LowRankTask&, int64_t block_begin, int64_t block_end);
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
