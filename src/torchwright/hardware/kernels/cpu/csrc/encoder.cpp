// What follows the packed linear layers of encoders.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "encoder.h"
#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::Activation;
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
    low = select(v < low, v, low);
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
  x = select(x < F{}, F{}, x);
  return select(x > top, top, x);
}

// 1 + e^-x, to about 1e-6 of it for |x| ≤ 16.
inline F one_and_exp_of_minus(F x) {
#if defined(__AVX512F__)
  // 2^f on 0 ≤ f < 1 by a polynomial of least relative error (8e-8); infinity has none of that, and scalef adds the rest.
  const F t = x * -1.44269504f;
  const F f = (F)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF);
  F y = fma(splat(1.86713009e-3f), f, splat(9.01703028e-3f));
  y = fma(y, f, splat(5.57999132e-2f));
  y = fma(y, f, splat(2.4016445e-1f));
  y = fma(y, f, splat(6.93151312e-1f));
  y = fma(y, f, splat(1.0f));
  return (F)_mm512_scalef_ps((__m512)y, (__m512)t) + 1.0f;
#else
  const F y = exp(-max(splat(-80.0f), x)) + 1.0f;
  return select(x != x, x, select(x < -80.0f, splat(INFINITY), y));
#endif
}

template <Activation A>
inline F activated(F x) {
  if constexpr (A == Activation::relu) return select(x < F{}, F{}, x);
  else if constexpr (A == Activation::gelu) return gelu(x);
  else if constexpr (A == Activation::gelu_tanh) return activate(x, false);
  else if constexpr (A == Activation::silu) return x / one_and_exp_of_minus(x);
  else if constexpr (A == Activation::relu6) return hard(x, 6);
  else if constexpr (A == Activation::sigmoid) return splat(1.0f) / one_and_exp_of_minus(x);
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

template <class T>
void turn_token(const tw::TurnTask& t, int64_t token) {
  alignas(64) float head[tw::LARGEST_HEAD];
  const int64_t half = t.head_size / 2, parts = 3 * t.heads;
  const float *cos = t.cos + token * half, *sin = t.sin + token * half;
  for (int64_t h = 0; h < parts; h++) {
    const T* from = (const T*)t.qkv + (token * parts + h) * t.head_size;
    T* to = (T*)t.out + (token * parts + h) * t.padded;
    for (int64_t d = 0; d < t.padded; d += LANES)
      store(head + d, d + LANES <= t.head_size ? load_f32(from + d) : load_first(from + d, t.head_size - d));
    if (h < 2 * t.heads)
      for (int64_t d = 0; d < half; d++) {
        const float a = head[d], b = head[d + half];
        head[d] = a * cos[d] - b * sin[d];
        head[d + half] = b * cos[d] + a * sin[d];
      }
    for (int64_t d = 0; d < t.padded; d += LANES) store_f32(to + d, load<F>(head + d));
  }
}

void turn_heads(const tw::TurnTask& t, int64_t token) {
  if (t.type == Type::f32) turn_token<float>(t, token);
  else turn_token<uint16_t>(t, token);
}

}  // namespace TW_ISA
