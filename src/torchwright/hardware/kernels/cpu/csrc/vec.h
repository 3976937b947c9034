// Sixteen lanes of float or int, the width of every packed block, on whatever registers the target has.
//
// The compiler's vector extension carries the arithmetic; what it cannot say (byte dot products, bfloat16) is written
// per instruction set below. Every source that includes this is compiled once per instruction set, in a namespace of
// its own (TW_ISA).
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "numbers.h"

namespace TW_ISA {

inline F max(F a, F b) { return select(a > b, a, b); }
// |x| as bits: their order is the numbers', with infinity above all of them and NaN above that.
inline I magnitude(F x) { return (I)(as_bits(x) & 0x7fffffffu); }
inline I max(I a, I b) { return select(a > b, a, b); }

}  // namespace TW_ISA

#if defined(TW_FOUR)
#include "vec_arm.h"
#else
#include "vec_x86.h"
#endif

namespace TW_ISA {

#if !defined(TW_WORDS)
// Σ (w - 8) · a over SUMMED weights below 16: begun with the sum of the a, added to four at a time, and at last scaled
// by a 16-bit number with zeros above it. Over SUMMED products of at most 8 · 127 a sum fits 16 bits.
inline I nibble_sums(int32_t sum) { return splat(-8 * sum); }
inline I add_products(I sums, U w, int32_t a) { return dot4<true>(sums, w, a); }
inline I add_scaled(I acc, I sums, I m) { return multiply_add(acc, sums, m); }
#endif

inline F load_f32(const float* p) { return load<F>(p); }

// The first of sixteen, and zeros for the others.
inline F load_first(const float* p, int64_t count) {
#if defined(__AVX512F__)
  return (F)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
#else
  F x = F{};
  std::memcpy(&x, p, count * sizeof(float));
  return x;
#endif
}

inline F load_first(const uint16_t* p, int64_t count) {
#if defined(__AVX512F__)
  const __m256i x = _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), p);
  return (F)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
#else
  uint16_t all[LANES] = {};
  std::memcpy(all, p, count * sizeof(uint16_t));
  return load_f32(all);
#endif
}

inline F load_first(const Half* p, int64_t count) {
  Half all[LANES] = {};
  std::memcpy(all, p, count * sizeof(Half));
  return load_f32(all);
}

inline F load_f32(const int8_t* p) { return to_float(small_integers(p)); }

inline void store_f32(float* p, F x) { store(p, x); }

// Sixteen and sixteen, one after the other, as bfloat16.
inline void store_pair(uint16_t* p, F low, F high) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  store_f32(p, low);
  store_f32(p + LANES, high);
#endif
}

// Σ of 32 signed bytes.
inline int32_t byte_sum32(const int8_t* p) {
  int32_t total = 0;
  for (int i = 0; i < 32; i++) total += p[i];
  return total;
}

// e^x to about 2 units in the last place, for x ≤ 88; 0 below -87.
inline F exp(F x) {
  const F low = splat(-87.0f);
  const I alive = x > low;
  x = max(x, low);
  const F n = to_float(round_to_int(x * 1.44269504f));
  // Cody and Waite's two-part ln 2, then Taylor's series to x^6 on |f| ≤ ln 2 / 2.
  F f = fma(n, splat(-0.693359375f), x);
  f = fma(n, splat(2.12194440e-4f), f);
  F y = splat(1.0f / 720);
  y = fma(y, f, splat(1.0f / 120));
  y = fma(y, f, splat(1.0f / 24));
  y = fma(y, f, splat(1.0f / 6));
  y = fma(y, f, splat(0.5f));
  y = fma(y, f, splat(1.0f));
  y = fma(y, f, splat(1.0f));
  const I power = (to_int(n) + 127) << 23;
  return select(alive, y * (F)power, F{});
}

// 2^x to about 2 units in the last place, for x ≤ 127; 0 below -126.
inline F exp2(F x) {
  // Taylor's series of 2^f on |f| ≤ 1/2, to f^6.
#if defined(__AVX512F__)
  const F n = (F)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const I dead = x <= splat(-126.0f);
  x = max(splat(-126.0f), x);  // in this order a NaN stays one
  const F n = to_float(round_to_int(x));
#endif
  const F f = x - n;
  F y = fma(splat(1.54035304e-4f), f, splat(1.33335581e-3f));
  y = fma(y, f, splat(9.61812911e-3f));
  y = fma(y, f, splat(5.55041087e-2f));
  y = fma(y, f, splat(2.40226507e-1f));
  y = fma(y, f, splat(6.93147181e-1f));
  y = fma(y, f, splat(1.0f));
#if defined(__AVX512F__)
  return (F)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  const I power = (to_int(n) + 127) << 23;
  return select(dead, F{}, y * (F)power);
#endif
}

// Between the ends, where a function has come to its limits; a NaN stays one.
inline F within(F x, float end) {
  x = select(x > splat(end), splat(end), x);
  return select(x < splat(-end), splat(-end), x);
}
// `exp` answers 0 for a NaN, which y - y brings back.
inline F sigmoid(F x) {
  const F y = within(x, 80);
  return 1.0f / (exp(-y) + 1.0f) + (y - y);
}
inline F tanh(F x) {
  const F y = within(x, 15);
  const F e = exp(y + y);
  return (e - 1.0f) / (e + 1.0f) + (y - y);
}

template <class T>
inline T read(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

}  // namespace TW_ISA
