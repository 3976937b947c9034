// What encoders do beside packed linear layers: what follows a layer, and attention without a cache.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "encoder.h"
#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::Activation;
using tw::DenseAttentionTask;
using tw::FinishTask;

// A row of activations about the middle of its range: half the step that zero in the middle takes where all values
// have one sign, as after an activation. Infinities and NaN make the whole row NaN.
template <class T>
void quantize_centered_row(const T* x, int64_t features, int64_t row, const tw::QuantizedRows& to, float* centers) {
  float tail[LANES];
  const int64_t whole = features / LANES * LANES, rest = features - whole;
  for (int64_t j = 0; j < LANES; j++) {
    const int64_t i = j < rest ? whole + j : 0;
    if constexpr (sizeof(T) == 4) tail[j] = x[i];
    else tail[j] = widen(x[i]);
  }
  const F last = load<F>(tail);
  F low = last, high = last;
  I peak = magnitude(last);
  for (int64_t i = 0; i < whole; i += LANES) {
    const F v = load_f32(x + i);
    low = v < low ? v : low;
    high = max(v, high);
    peak = max(peak, magnitude(v));
  }
  constexpr int32_t INFINITE = 0x7f800000;
  bool finite = true;
  for (int j = 0; j < LANES; j++) finite = finite && peak[j] < INFINITE;
  const float top = largest(high), bottom = -largest(-low);
  const float center = 0.5f * top + 0.5f * bottom, half = 0.5f * top - 0.5f * bottom;
  centers[row] = finite ? center : NAN;
  to.scale[row] = finite ? half / tw::LEVELS_8 : NAN;
  const float inverse = finite && half > tw::LEVELS_8 * tw::SMALLEST_STEP ? tw::LEVELS_8 / half : 0;
  int8_t* q = to.q + row * to.stride;
  for (int64_t k = 0; k < to.depth; k += LANES) {
    // Beyond the features the weights are zero.
    const F v = k < whole ? load_f32(x + k) : last;
    store_s8(q + k, finite ? round_to_int((v - center) * inverse) : I{});
  }
  const int64_t count = to.depth / tw::SUMMED;
  int32_t* sums = to.sums + row * (count + 1);
  sums[count] = 0;
  for (int64_t g = 0; g < count; g++) sums[count] += sums[g] = byte_sum32(q + g * tw::SUMMED);
}

void quantize_centered(const void* x, Type type, int64_t features, int64_t row, const tw::QuantizedRows& to,
                       float* centers) {
  if (type == Type::f32) return quantize_centered_row((const float*)x + row * features, features, row, to, centers);
  quantize_centered_row((const uint16_t*)x + row * features, features, row, to, centers);
}

// x · Φ(x): max(x, 0) - |x| erfc(|x| / √2) / 2, by Abramowitz and Stegun 7.1.26, whose erfc is right to 1.5e-7.
inline F gelu(F x) {
  const F size = (F)magnitude(x);
  const F t = splat(1.0f) / fma(size, splat(0.3275911f * 0.70710678f), splat(1.0f));
  F y = fma(splat(1.061405429f), t, splat(-1.453152027f));
  y = fma(y, t, splat(1.421413741f));
  y = fma(y, t, splat(-0.284496736f));
  y = fma(y, t, splat(0.254829592f)) * t;
  const F erfc = y * exp2(max(x * x * splat(-0.72134752f), splat(-125.0f)));
  return max(x, F{}) - size * erfc * splat(0.5f);
}

// x between 0 and `most`; NaN stays.
inline F hard(F x, float most) {
  const F top = splat(most);
  x = x < F{} ? F{} : x;
  return x > top ? top : x;
}

template <Activation A>
inline F activated(F x) {
  if constexpr (A == Activation::relu) return x < F{} ? F{} : x;
  else if constexpr (A == Activation::gelu) return gelu(x);
  else if constexpr (A == Activation::gelu_tanh) return activate(x, false);
  else if constexpr (A == Activation::silu) return activate(x, true);
  else if constexpr (A == Activation::relu6) return hard(x, 6);
  else if constexpr (A == Activation::sigmoid) return x != x ? x : splat(1.0f) / (exp(-max(x, splat(-80.0f))) + 1.0f);
  else if constexpr (A == Activation::hardswish) return x * hard(x + 3.0f, 6) * splat(1.0f / 6);
  else if constexpr (A == Activation::hardsigmoid) return hard(x + 3.0f, 6) * splat(1.0f / 6);
  else return x;
}

// Calls `use` with the activation as a constant of its type.
template <class Use>
inline void with_activation(Activation which, const Use& use) {
  switch (which) {
#define TW_CASE(A) \
  case Activation::A: return use(std::integral_constant<Activation, Activation::A>{});
    TW_CASE(none) TW_CASE(relu) TW_CASE(gelu) TW_CASE(gelu_tanh) TW_CASE(silu)
    TW_CASE(relu6) TW_CASE(sigmoid) TW_CASE(hardswish) TW_CASE(hardsigmoid)
#undef TW_CASE
  }
}

template <class T>
void activate_values(const T* x, T* out, int64_t features, Activation activation) {
  with_activation(activation, [&](auto a) {
    int64_t i = 0;
    for (; i + LANES <= features; i += LANES) store_f32(out + i, activated<a()>(load_f32(x + i)));
    if (i == features) return;
    T rest[LANES] = {};
    std::memcpy(rest, x + i, (features - i) * sizeof(T));
    put(out + i, activated<a()>(load_f32((const T*)rest)), features - i);
  });
}

void activate_row(const void* x, void* out, Type type, int64_t features, int64_t row, Activation activation) {
  const int64_t at = row * features;
  if (type == Type::f32) activate_values((const float*)x + at, (float*)out + at, features, activation);
  else activate_values((const uint16_t*)x + at, (uint16_t*)out + at, features, activation);
}

template <Activation A, class T>
void finish_block(const FinishTask& t, int64_t row_begin, int64_t row_end, int64_t from, int64_t to) {
  for (int64_t row = row_begin; row < row_end; row++) {
    T* out = (T*)t.out + row * t.stride;
    const T* residual = t.residual ? (const T*)t.residual + row * t.stride : nullptr;
    for (int64_t i = from; i < to; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, to - i);
      T some[LANES] = {}, more[LANES] = {};
      const T *x = out + i, *add = residual + i;
      if (count < LANES) {
        std::memcpy(some, x, count * sizeof(T));
        if (residual) std::memcpy(more, add, count * sizeof(T));
        x = some, add = more;
      }
      F y = activated<A>(fma(splat(t.centers[row]), load<F>(t.sums + i), load_f32(x)));
      if (residual) y = y + load_f32(add);
      put(out + i, y, count);
    }
  }
}

void finish(const FinishTask& t, int64_t row_begin, int64_t row_end, int64_t from, int64_t to) {
  with_activation(t.activation, [&](auto a) {
    if (t.type == Type::f32) finish_block<a(), float>(t, row_begin, row_end, from, to);
    else finish_block<a(), uint16_t>(t, row_begin, row_end, from, to);
  });
}

// Keys and values of one head in the order in which the products read them, and the scores of some queries.
// Keys are (blocks of 16, head_size / 2, 16, 2) and values (pairs of keys, head_size, 2), padded with zeros.
class Head {
 public:
  Head(const DenseAttentionTask& t, int64_t batch, int64_t head)
      : t(t),
        width((t.keys + LANES - 1) / LANES * LANES),
        keys(allocate(width * t.head_size * 2)),
        values(allocate(width * t.head_size * 2)),
        scores(allocate(ROWS * width * 4)),
        weights(allocate(ROWS * width * 2)),
        masked(allocate(width * 4)),
        q(t.q.data + batch * t.q.batch + head * t.q.head),
        out(t.out + (batch * t.queries * t.heads + head) * t.head_size),
        mask_at(batch * t.mask_batch + head * t.mask_head) {
    pack_keys(t.k.data + batch * t.k.batch + head * t.k.head);
    pack_values(t.v.data + batch * t.v.batch + head * t.v.head);
    if (t.mask && !t.mask_query) read_mask(0);
  }

  void run(int64_t begin, int64_t end) const {
    const int64_t tiles = (end - begin + ROWS - 1) / ROWS;
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t from = begin + (end - begin) * i / tiles;
      dispatch<ROWS>(from, begin + (end - begin) * (i + 1) / tiles - from);
    }
  }

 private:
  static constexpr int ROWS = 6, BLOCKS_AT_ONCE = 4;

  void pack_keys(const uint16_t* from) const {
    const int64_t pairs = t.head_size / 2;
    uint32_t* to = (uint32_t*)keys.get();
    for (int64_t key = 0; key < width; key++) {
      uint32_t* column = to + key / LANES * pairs * LANES + key % LANES;
      const char* row = (const char*)(from + key * t.k.token);
      for (int64_t d = 0; d < pairs; d++) column[d * LANES] = key < t.keys ? read<uint32_t>(row + 4 * d) : 0;
    }
  }

  void pack_values(const uint16_t* from) const {
    uint32_t* to = (uint32_t*)values.get();
    for (int64_t key = 0; key < width; key += 2, to += t.head_size) {
      const uint16_t* row = from + key * t.v.token;
      if (key + 1 < t.keys)
        for (int64_t d = 0; d < t.head_size; d++) to[d] = row[d] | uint32_t(row[t.v.token + d]) << 16;
      else
        for (int64_t d = 0; d < t.head_size; d++) to[d] = key < t.keys ? row[d] : 0;
    }
  }

  // What is added to a query's scores in powers of two.
  void read_mask(int64_t query) const {
    float* to = (float*)masked.get();
    const int64_t at = mask_at + query * t.mask_query;
    for (int64_t key = 0; key < t.keys; key++) {
      const int64_t i = at + key * t.mask_key;
      to[key] = t.mask_is_bool ? ((const bool*)t.mask)[i] ? 0 : NOTHING : ((const float*)t.mask)[i] * LOG2_E;
    }
  }

  template <int R>
  void dispatch(int64_t query, int64_t rows) const {
    if constexpr (R > 1) {
      if (rows < R) return dispatch<R - 1>(query, rows);
    }
    int64_t block = 0;
    const int64_t blocks = width / LANES;
    for (; block + BLOCKS_AT_ONCE <= blocks; block += BLOCKS_AT_ONCE) score<R, BLOCKS_AT_ONCE>(query, block);
    if (blocks - block == 3) score<R, 3>(query, block);
    else if (blocks - block == 2) score<R, 2>(query, block);
    else if (blocks - block == 1) score<R, 1>(query, block);
    float inverse[R];
    for (int r = 0; r < R; r++) inverse[r] = soften(query + r, r);
    int64_t d = 0;
    for (; d + 4 * LANES <= t.head_size; d += 4 * LANES) weigh<R, 4>(query, d, inverse);
    for (; d + 2 * LANES <= t.head_size; d += 2 * LANES) weigh<R, 2>(query, d, inverse);
    for (; d < t.head_size; d += LANES) weigh<R, 1>(query, d, inverse);
  }

  template <int R, int B>
  void score(int64_t query, int64_t block) const {
    F sum[R][B];
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++) sum[r][b] = F{};
    const uint32_t* from = (const uint32_t*)keys.get() + block * t.head_size / 2 * LANES;
    const uint16_t* rows = q + query * t.q.token;
    for (int64_t d = 0; d < t.head_size; d += 2, from += LANES) {
      U key[B];
      for (int b = 0; b < B; b++) key[b] = load<U>(from + b * t.head_size / 2 * LANES);
      for (int r = 0; r < R; r++) {
        const uint32_t two = read<uint32_t>(rows + r * t.q.token + d);
        for (int b = 0; b < B; b++) sum[r][b] = dot2(sum[r][b], key[b], two);
      }
    }
    float* to = (float*)scores.get() + block * LANES;
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++) store(to + r * width + b * LANES, sum[r][b]);
  }

  // Turns a row of scores into weights up to their sum, whose inverse it returns: zero where nothing is seen.
  float soften(int64_t query, int r) const {
    float* s = (float*)scores.get() + r * width;
    uint16_t* p = (uint16_t*)weights.get() + r * width;
    if (t.mask && t.mask_query) read_mask(query);
    const float* mask = (const float*)masked.get();
    const F scale = splat(t.scale * LOG2_E), nothing = splat(NOTHING);
    F peak = nothing;
    for (int64_t key = 0; key < width; key += LANES) {
      F x = load<F>(s + key) * scale;
      if (t.mask) x = max(nothing, x + load<F>(mask + key));
      if (key + LANES > t.keys) {
        const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        x = lane + int32_t(key) < int32_t(t.keys) ? x : nothing;
      }
      store(s + key, x);
      peak = max(peak, x);
    }
    const float top = largest(peak);
    F total = F{};
    for (int64_t key = 0; key < width; key += LANES) {
      const F x = load<F>(s + key);
      const F weight = x <= nothing ? F{} : exp2(max(splat(-126.0f), x - top));
      total = total + weight;
      store_f32(p + key, weight);
    }
    const float all = sum(total);
    return all == 0 ? 0 : 1 / all;
  }

  template <int R, int B>
  void weigh(int64_t query, int64_t d, const float* inverse) const {
    F acc[R][B];
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++) acc[r][b] = F{};
    const uint32_t* from = (const uint32_t*)values.get() + d;
    const uint16_t* p = (const uint16_t*)weights.get();
    for (int64_t key = 0; key < t.keys; key += 2, from += t.head_size) {
      U pair[B];
      for (int b = 0; b < B; b++) pair[b] = load<U>(from + b * LANES);
      for (int r = 0; r < R; r++) {
        const uint32_t two = read<uint32_t>(p + r * width + key);
        for (int b = 0; b < B; b++) acc[r][b] = dot2(acc[r][b], pair[b], two);
      }
    }
    for (int r = 0; r < R; r++) {
      uint16_t* to = out + (query + r) * t.heads * t.head_size + d;
      for (int b = 0; b < B; b++) store_f32(to + b * LANES, acc[r][b] * splat(inverse[r]));
    }
  }

  const DenseAttentionTask& t;
  const int64_t width;  // keys, in whole blocks
  const Bytes keys, values, scores, weights, masked;
  const uint16_t* q;
  uint16_t* out;
  const int64_t mask_at;
};

void dense_attention(const DenseAttentionTask& t, int64_t batch, int64_t head, int64_t begin, int64_t end) {
  Head(t, batch, head).run(begin, end);
}

}  // namespace TW_ISA
