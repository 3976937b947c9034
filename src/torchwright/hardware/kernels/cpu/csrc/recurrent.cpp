// Short convolutions and linear recurrences: tokens of a sequence one after the other, so that neither where a prompt is
// cut nor which sequences keep it company changes a bit.
#include <cmath>

#include "recurrent.h"
#include "vec.h"

namespace TW_ISA {

template <class T>
void short_conv_of(const tw::ShortConvTask& t, int64_t sequence, int64_t begin, int64_t end) {
  const int64_t first = t.rows.starts[sequence], tokens = t.rows.starts[sequence + 1] - first, past = t.width - 1;
  const int64_t channels = t.channels, size = past * channels;
  float* const state = t.states + t.rows.slots[sequence] * size;
  const T* const x = (const T*)t.x + first * t.stride;
  // The input at a token, of which those before the first are in the state.
  const auto input = [&](int64_t token, int64_t c) {
    return token < 0 ? load_f32(state + (past + token) * channels + c) : load_f32(x + token * t.stride + c);
  };
  const auto value = [&](int64_t token, int64_t c) {
    return token < 0 ? state[(past + token) * channels + c] : get(x + token * t.stride + c);
  };
  const auto keep = [&](float* to, int64_t done) {
    for (int64_t i = 0; i < past; i++) {
      int64_t c = begin;
      for (; c + LANES <= end; c += LANES) store_f32(to + i * channels + c, input(done - past + i, c));
      for (; c < end; c++) to[i * channels + c] = value(done - past + i, c);
    }
  };
  for (int64_t token = 0; token < tokens; token++) {
    T* const out = (T*)t.out + (first + token) * channels;
    int64_t c = begin;
    for (; c + LANES <= end; c += LANES) {
      F y = t.bias ? load_f32(t.bias + c) : F{};
      for (int64_t i = 0; i < t.width; i++) y = fma(load_f32(t.weight + i * channels + c), input(token - past + i, c), y);
      store_f32(out + c, t.silu ? activate(y, true) : y);
    }
    for (; c < end; c++) {
      float y = t.bias ? t.bias[c] : 0;
      for (int64_t i = 0; i < t.width; i++) y += t.weight[i * channels + c] * value(token - past + i, c);
      set(out + c, t.silu ? activate(splat(y), true)[0] : y);
    }
  }
  for (int64_t mark = t.rows.first_mark(first); mark < t.rows.marks && t.rows.mark_rows[mark] < first + tokens; mark++)
    keep(t.states + t.rows.mark_slots[mark] * size, t.rows.mark_rows[mark] + 1 - first);
  keep(state, tokens);  // last, and the oldest first: what it reads of the old state it has not written yet
}

// The channels from `begin` to `end` of one sequence.
void short_conv(const tw::ShortConvTask& task, int64_t sequence, int64_t begin, int64_t end) {
  if (task.type == Type::f32) short_conv_of<float>(task, sequence, begin, end);
  else short_conv_of<uint16_t>(task, sequence, begin, end);
}

template <class T>
void recurrence_keys_of(const tw::RecurrenceKeys& t, int64_t token) {
  for (int64_t head = 0; head < t.heads; head++) {
    const T* const q = (const T*)t.q + token * t.stride + head * t.size;
    const T* const k = (const T*)t.k + token * t.stride + head * t.size;
    float* const to_q = t.both + (token * t.heads + head) * 2 * t.size;
    float* const to_k = to_q + t.size;
    float q_squares = 0, k_squares = 0, product = 0;
    for (int64_t i = 0; i < t.size; i++) {
      to_q[i] = get(q + i), to_k[i] = get(k + i);
      q_squares += to_q[i] * to_q[i], k_squares += to_k[i] * to_k[i];
    }
    if (t.normalize) {
      constexpr float EPS = 1e-6f;  // Yang et al. (2024), as their kernels have it
      const float by_q = 1 / (std::sqrt(q_squares + EPS) * std::sqrt(float(t.size)));
      const float by_k = 1 / std::sqrt(k_squares + EPS);
      for (int64_t i = 0; i < t.size; i++) to_q[i] *= by_q, to_k[i] *= by_k;
    }
    for (int64_t i = 0; i < t.size; i++) product += to_q[i] * to_k[i];
    t.products[token * t.heads + head] = product;
  }
}

void recurrence_keys(const tw::RecurrenceKeys& task, int64_t token) {
  if (task.type == Type::f32) recurrence_keys_of<float>(task, token);
  else recurrence_keys_of<uint16_t>(task, token);
}

// N times sixteen columns of a state, once over its rows: adds a token's change, and reads for the next token's key and
// query what the state then has. Both in one pass, because a state is larger than the registers.
template <int N, bool WRITES, bool READS>
inline void pass(float* state, int64_t stride, int64_t rows, const float* key, float decay, const F* change,
                 const float* next_query, const float* next_key, F* by_key, F* by_query) {
  F k[N], q[N];
  for (int n = 0; n < N; n++) k[n] = q[n] = F{};
  for (int64_t row = 0; row < rows; row++)
    for (int n = 0; n < N; n++) {
      float* const at = state + row * stride + n * LANES;
      F s = load_f32(at);
      if constexpr (WRITES) {
        s = fma(splat(key[row]), change[n], s * decay);
        store_f32(at, s);
      }
      if constexpr (READS) {
        k[n] = fma(splat(next_key[row]), s, k[n]);
        q[n] = fma(splat(next_query[row]), s, q[n]);
      }
    }
  if constexpr (READS)
    for (int n = 0; n < N; n++) by_key[n] = k[n], by_query[n] = q[n];
}

template <int N, class T>
void recur_columns(const tw::RecurrenceTask& t, int64_t sequence, int64_t head, int64_t column) {
  const int64_t first = t.rows.starts[sequence], end = t.rows.starts[sequence + 1];
  if (first == end) return;
  const int64_t size = t.key_size, state_size = t.heads * size * t.size, key_head = head * t.key_heads / t.heads;
  const int64_t at = head * size * t.size + column;
  float* const state = t.states + t.rows.slots[sequence] * state_size + at;
  const auto query = [&](int64_t token) { return t.both + (token * t.key_heads + key_head) * 2 * size; };
  int64_t mark = t.rows.first_mark(first);
  F by_key[N], by_query[N], change[N];
  pass<N, false, true>(state, t.size, size, nullptr, 1, nullptr, query(first), query(first) + size, by_key, by_query);
  for (int64_t token = first; token < end; token++) {
    const float decay = t.decay[token * t.heads + head], gain = t.gain[token * t.heads + head];
    const float product = t.products[token * t.key_heads + key_head], skip = t.skip ? t.skip[head] : 0;
    const T* const value = (const T*)t.v + token * t.stride + head * t.size + column;
    T* const out = (T*)t.out + (token * t.heads + head) * t.size + column;
    for (int n = 0; n < N; n++) {
      const F v = load_f32(value + n * LANES);
      change[n] = (t.corrects ? v - by_key[n] * decay : v) * gain;
      F y = fma(change[n], splat(product), by_query[n] * decay);
      if (t.skip) y = fma(v, splat(skip), y);
      store_f32(out + n * LANES, y);
    }
    const float* const key = query(token) + size;
    if (token + 1 < end)
      pass<N, true, true>(state, t.size, size, key, decay, change, query(token + 1), query(token + 1) + size, by_key,
                          by_query);
    else
      pass<N, true, false>(state, t.size, size, key, decay, change, nullptr, nullptr, nullptr, nullptr);
    for (; mark < t.rows.marks && t.rows.mark_rows[mark] == token; mark++) {
      float* const copy = t.states + t.rows.mark_slots[mark] * state_size + at;
      for (int64_t row = 0; row < size; row++)
        std::memcpy(copy + row * t.size, state + row * t.size, N * LANES * sizeof(float));
    }
  }
}

// Thirty-two columns of one head's state of one sequence, or the last sixteen: for 128 rows 16 KB, which stay in the
// first level of cache from token to token.
void recur(const tw::RecurrenceTask& task, int64_t sequence, int64_t head, int64_t column) {
  const bool two = column + 2 * LANES <= task.size;
  if (task.type == Type::f32)
    (two ? recur_columns<2, float> : recur_columns<1, float>)(task, sequence, head, column);
  else
    (two ? recur_columns<2, uint16_t> : recur_columns<1, uint16_t>)(task, sequence, head, column);
}

template <class T>
void gated_norm_of(const tw::GatedNormTask& t, int64_t row) {
  const T* const x = (const T*)t.x + row * t.size;
  const T* const gate = (const T*)t.gate + row / t.heads * t.stride + row % t.heads * t.size;
  const float* const weight = t.weight + row % t.heads * t.size;
  T* const out = (T*)t.out + row * t.size;
  const auto open = [&](int64_t i) { return activate(load_f32(gate + i), true); };
  const auto value = [&](int64_t i) { return t.gate_first ? load_f32(x + i) * open(i) : load_f32(x + i); };
  F squares = F{};
  for (int64_t i = 0; i < t.size; i += LANES) {
    const F v = value(i);
    squares = fma(v, v, squares);
  }
  const float inverse = 1 / std::sqrt(sum(squares) / float(t.size) + t.eps);
  for (int64_t i = 0; i < t.size; i += LANES) {
    const F y = value(i) * splat(inverse) * load_f32(weight + i);
    store_f32(out + i, t.gate_first ? y : y * open(i));
  }
}

void gated_norm(const tw::GatedNormTask& task, int64_t row) {
  if (task.type == Type::f32) gated_norm_of<float>(task, row);
  else gated_norm_of<uint16_t>(task, row);
}

}  // namespace TW_ISA
