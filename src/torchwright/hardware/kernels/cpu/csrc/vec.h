// Sixteen lanes of float or int, the width of every packed block, on whatever registers the target has.
//
// The compiler's vector extension carries the arithmetic; what it cannot say (byte dot products, bfloat16) is written
// per instruction set below. Every source that includes this is compiled once per instruction set, in a namespace of
// its own (TW_ISA).
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace TW_ISA {

inline F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(TW_TWO)
  return {(F::Half)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)c.low),
          (F::Half)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)c.high)};
#else
  return a * b + c;
#endif
}

inline F max(F a, F b) { return select(a > b, a, b); }
// |x| as bits: their order is the numbers', with infinity above all of them and NaN above that.
inline I magnitude(F x) { return (I)(as_bits(x) & 0x7fffffffu); }
inline I max(I a, I b) { return select(a > b, a, b); }

// Round to the nearest integer, ties to even, for |x| < 2^22.
inline I round_to_int(F x) {
#if defined(__AVX512F__)
  return (I)_mm512_cvtps_epi32((__m512)x);
#else
  const F magic = splat(12582912.0f);
  return to_int((x + magic) - magic);
#endif
}

inline float sum(F x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
#endif
}

inline float largest(F x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float found = x[0];
  for (int i = 1; i < LANES; i++) found = x[i] > found ? x[i] : found;
  return found;
#endif
}

inline float read_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// bfloat16 as its 16 bits.
inline float widen(uint16_t x) { return read_bits(uint32_t(x) << 16); }

inline uint16_t narrow(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline F load_f32(const float* p) { return load<F>(p); }

inline F load_f32(const uint16_t* p) {
#if defined(__AVX512F__)
  return (F)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
#elif defined(TW_TWO)
  const auto half = [&](int from) {
    return (F::Half)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + from))), 16);
  };
  return {half(0), half(8)};
#else
  typedef uint16_t H __attribute__((vector_size(32)));
  H half;
  std::memcpy(&half, p, sizeof half);
  return as_float(__builtin_convertvector(half, U) << 16);
#endif
}

// float16.
struct Half {
  uint16_t bits;
};

inline float widen(Half x) {
  const uint32_t size = x.bits & 0x7fffu, sign = uint32_t(x.bits & 0x8000u) << 16;
  const float y = read_bits(size << 13) * 0x1p112f;  // exact, below the least normal number too
  return read_bits((size >= 0x7c00 ? 0x7f800000u | size << 13 : bits_of(y)) | sign);
}

// Ties to even.
inline Half narrow_half(float x) {
  const uint32_t all = bits_of(x), sign = all >> 16 & 0x8000u, size = all & 0x7fffffffu;
  if (size > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
  if (size >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};
  if (size < 0x38800000u) return {uint16_t(sign | (bits_of(read_bits(size) + 0.5f) - 0x3f000000u))};
  return {uint16_t(sign | ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112u << 10))};
}

inline F load_f32(const Half* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(TW_TWO)
  const auto half = [&](int from) { return (F::Half)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + from))); };
  return {half(0), half(8)};
#else
  F x;
  for (int i = 0; i < LANES; i++) x[i] = widen(p[i]);
  return x;
#endif
}

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

// Thirty-two float16, two in each lane.
inline void from_halves(U x, F (&out)[2]) {
#if defined(__AVX512F__)
  out[0] = (F)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)x));
  out[1] = (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)x, 1));
#else
  Half all[2 * LANES];
  store(all, x);
  out[0] = load_f32(all), out[1] = load_f32(all + LANES);
#endif
}

// The first eight of sixteen, each two times, and the last eight.
inline void twice(F x, F (&out)[2]) {
#if defined(TW_TWO)
  const auto both = [](F::Half half) {
    const __m256i low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3), high = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
    return F{(F::Half)_mm256_permutevar8x32_ps((__m256)half, low), (F::Half)_mm256_permutevar8x32_ps((__m256)half, high)};
  };
  out[0] = both(x.low), out[1] = both(x.high);
#else
  out[0] = __builtin_shufflevector(x, x, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  out[1] = __builtin_shufflevector(x, x, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
#endif
}

inline I small_integers(const int8_t* p) {
#if defined(__AVX512F__)
  return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(TW_TWO)
  const auto half = [&](int from) {
    return (I::Half)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + from)));
  };
  return {half(0), half(8)};
#else
  typedef int8_t B __attribute__((vector_size(16)));
  B bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, I);
#endif
}

inline F load_f32(const int8_t* p) { return to_float(small_integers(p)); }

inline void store_f32(float* p, F x) { store(p, x); }

inline void store_f32(uint16_t* p, F x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#elif defined(TW_TWO)
  const U bits = as_bits(x), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U narrow = select(magnitude(x) > 0x7f800000, (bits >> 16) | 0x40u, rounded);
  const __m256i both = _mm256_packus_epi32((__m256i)narrow.low, (__m256i)narrow.high);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
#else
  for (int i = 0; i < LANES; i++) p[i] = narrow(x[i]);
#endif
}

inline void store_f32(Half* p, F x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(TW_TWO)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph((__m256)x.high, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < LANES; i++) p[i] = narrow_half(x[i]);
#endif
}

// Sixteen and sixteen, one after the other, as bfloat16.
inline void store_pair(uint16_t* p, F low, F high) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  store_f32(p, low);
  store_f32(p + LANES, high);
#endif
}

inline void store_s8(int8_t* p, I x) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8((__m512i)x));
#elif defined(TW_TWO)
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x.low, (__m256i)x.high), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
  for (int i = 0; i < LANES; i++) p[i] = int8_t(x[i] > 127 ? 127 : x[i] < -128 ? -128 : x[i]);
#endif
}

#if defined(TW_TWO)
// As below, of eight lanes.
template <bool SMALL>
inline __m256i dot4(__m256i acc, __m256i w, __m256i a) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(acc, w, a);
#else
  if constexpr (SMALL)
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)));
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(a, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
#endif
}
#endif

// acc[i] + Σ_j w[i][j] · a[j] over four unsigned bytes of each lane of w and the four signed bytes of a.
// SMALL says that w is below 16, so that pairs of products fit 16 bits.
template <bool SMALL>
inline I dot4(I acc, U w, int32_t a) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(a));
#elif defined(TW_TWO)
  const __m256i as = _mm256_set1_epi32(a);
  return {(I::Half)dot4<SMALL>((__m256i)acc.low, (__m256i)w.low, as),
          (I::Half)dot4<SMALL>((__m256i)acc.high, (__m256i)w.high, as)};
#else
  int8_t as[4];
  std::memcpy(as, &a, 4);
  for (int j = 0; j < 4; j++) acc += (I)((w >> (8 * j)) & 0xffu) * int32_t(as[j]);
  return acc;
#endif
}

// acc[i] + x[i] · m[i], where x fits 16 bits and m is a 16-bit number with zeros above it.
inline I multiply_add(I acc, I x, I m) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)x, (__m512i)m);
#elif defined(TW_TWO)
  return acc + I{(I::Half)_mm256_madd_epi16((__m256i)x.low, (__m256i)m.low),
                 (I::Half)_mm256_madd_epi16((__m256i)x.high, (__m256i)m.high)};
#else
  return acc + x * ((I)((U)m << 16) >> 16);
#endif
}

// The bytes of x, all below 16, times the low byte of each of m's halves, plus those of `shift`, modulo 256.
inline U scaled_bytes(U x, U m, U shift) {
#if defined(TW_TWO)
  const auto half = [](__m256i x, __m256i m, __m256i shift) {
    const __m256i even = _mm256_mullo_epi16(_mm256_and_si256(x, _mm256_set1_epi32(0x00ff00ff)), m);
    const __m256i odd = _mm256_mullo_epi16(_mm256_and_si256(x, _mm256_set1_epi32(int(0xff00ff00))), m);
    const __m256i both = _mm256_or_si256(_mm256_and_si256(even, _mm256_set1_epi32(0x00ff00ff)), odd);
    return (U::Half)_mm256_add_epi8(both, shift);
  };
  return {half((__m256i)x.low, (__m256i)m.low, (__m256i)shift.low),
          half((__m256i)x.high, (__m256i)m.high, (__m256i)shift.high)};
#else
  typedef uint16_t H __attribute__((vector_size(64)));
  typedef uint8_t B __attribute__((vector_size(64)));
  const H even = (H)(x & 0x00ff00ffu) * (H)m, odd = (H)(x & 0xff00ff00u) * (H)m;
  const U both = ((U)even & 0x00ff00ffu) | (U)odd;
  return (U)((B)both + (B)shift);
#endif
}

// Σ of 32 signed bytes.
inline int32_t byte_sum32(const int8_t* p) {
  int32_t total = 0;
  for (int i = 0; i < 32; i++) total += p[i];
  return total;
}

// acc[i] + w[i][0]·a[0] + w[i][1]·a[1] over the two bfloat16 of each lane of w and of a.
inline F dot2(F acc, U w, uint32_t a) {
#if defined(__AVX512BF16__)
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)w, (__m512bh)_mm512_set1_epi32(int(a)));
#else
  acc = fma(as_float(w << 16), splat(widen(uint16_t(a))), acc);
  return fma(as_float(w & 0xffff0000u), splat(widen(uint16_t(a >> 16))), acc);
#endif
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

inline F tanh(F x) {
  const F limit = splat(15.0f);
  x = select(x > limit, limit, select(x < -limit, -limit, x));
  const F e = exp(x + x);
  return (e - 1.0f) / (e + 1.0f);
}

template <class T>
inline T read(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

}  // namespace TW_ISA
