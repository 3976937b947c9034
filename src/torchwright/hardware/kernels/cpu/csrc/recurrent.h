// Layers that keep a state of each sequence instead of its keys and values, shared by the operators and every
// instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace tw {

// The state of each sequence of a batch, and the slots that get copies while a state is computed.
struct StateRows {
  const int32_t* starts;  // sequence b's tokens are rows starts[b] to starts[b + 1]
  const int64_t* slots;   // its state
  const int64_t *mark_rows, *mark_slots;  // ascending rows, and the slots that get a copy of the state after them
  int64_t count, marks;

  int64_t first_mark(int64_t row) const {
    int64_t mark = 0;
    while (mark < marks && mark_rows[mark] < row) mark++;
    return mark;
  }
};

// A causal convolution of each channel with itself. A state holds the last `width - 1` inputs, the oldest first.
struct ShortConvTask {
  StateRows rows;
  const void* x;  // tokens, `stride` values apart
  Type type;      // f32 or bf16; the output's too
  int64_t stride, channels, width;
  const float *weight, *bias;  // (width, channels); (channels,) or null
  float* states;               // (slots, width - 1, channels)
  bool silu;
  void* out;
};

// Queries and keys of a recurrence in float32, their heads side by side for each token.
struct RecurrenceKeys {
  const void *q, *k;  // tokens, `stride` values apart
  Type type;
  int64_t stride, heads, size;
  bool normalize;   // to length one, and queries by the root of their size besides
  float* both;      // (tokens, heads, 2, size): query, key
  float* products;  // (tokens, heads): query · key
};

// S ← decay · S + key ⊗ change, out = query · S + skip · value, token after token; the change is gain · value, or
// gain · (value − key · decay · S) where it `corrects` what the state has for the key.
struct RecurrenceTask {
  StateRows rows;
  const float *both, *products;  // of `RecurrenceKeys`
  const float *decay, *gain;     // (tokens, heads)
  const float* skip;             // (heads,), or null
  const void* v;                 // tokens, `stride` values apart
  Type type;                     // of the values and of the output
  int64_t stride, key_heads, heads, key_size, size;
  float* states;  // (slots, heads, key_size, size)
  bool corrects;
  void* out;  // (tokens, heads, size)
};

// out = x / sqrt(mean(x²) + eps) · weight · silu(gate), or with the gate before the norm.
struct GatedNormTask {
  const void *x, *gate;  // rows of x; the gate's are `heads` to a token, tokens `stride` values apart
  Type type;
  int64_t size, heads, stride;
  const float* weight;  // (heads, size)
  float eps;
  bool gate_first;
  void* out;
};

}  // namespace tw
