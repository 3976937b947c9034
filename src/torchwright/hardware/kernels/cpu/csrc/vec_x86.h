// What the compiler's vectors cannot say, for AVX-512 and AVX2, and what stands for it elsewhere.
#pragma once

#include "lanes.h"

namespace TW_ISA {

inline F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(TW_TWO)
  return {(F::Half)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)c.low),
          (F::Half)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)c.high)};
#elif defined(__FP_FAST_FMAF)
  F y;
  for (int i = 0; i < LANES; i++) y[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return y;
#else
  return a * b + c;
#endif
}

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
  float part[8];
  for (int i = 0; i < 8; i++) part[i] = x[i] + x[i + 8];
  for (int i = 0; i < 4; i++) part[i] += part[i + 4];
  return (part[0] + part[1]) + (part[2] + part[3]);
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
inline __m256i dot4(__m256i acc, __m256i w, __m256i a) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(acc, w, a);
#else
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(a, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
#endif
}
#endif

// What `taken` takes from each byte, so that `dot4` can read it: 128 where both must be signed.
constexpr int32_t TAKEN = 0;
inline U taken(U w) { return w; }

// acc[i] + Σ_j (w[i][j] - TAKEN) · a[j] over four unsigned bytes of each lane of w, of which TAKEN is taken already, and
// the four signed bytes of a. SMALL says that w is below 16, so that pairs of products fit 16 bits; then none is taken.
template <bool SMALL>
inline I dot4(I acc, U w, int32_t a) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(a));
#elif defined(TW_TWO)
  const __m256i as = _mm256_set1_epi32(a);
  return {(I::Half)dot4((__m256i)acc.low, (__m256i)w.low, as), (I::Half)dot4((__m256i)acc.high, (__m256i)w.high, as)};
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

#if defined(TW_TWO) && !defined(__AVXVNNI__)
// See vec.h. Each lane is two words, whose sums of 16 products of at most 15 · 127 stay in 16 bits: two instructions for
// 32 products, where sums of 32 bits take three.
#define TW_WORDS
inline I nibble_sums(int32_t sum) {  // -8 · sum, in equal parts
  const I::Half words = (I::Half)_mm256_set1_epi16(int16_t(-4 * sum));
  return {words, words};
}

inline I add_products(I sums, U w, int32_t a) {
  const auto half = [as = _mm256_set1_epi32(a)](I::Half sums, U::Half w) {
    __m256i sum = _mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)w, as));
    asm("" : "+x"(sum));  // GCC would add products to each other first, for which registers do not suffice
    return (I::Half)sum;
  };
  return {half(sums.low, w.low), half(sums.high, w.high)};
}

inline I add_scaled(I acc, I sums, I m) {
  const I both = m | (m << 16);
  return acc + I{(I::Half)_mm256_madd_epi16((__m256i)sums.low, (__m256i)both.low),
                 (I::Half)_mm256_madd_epi16((__m256i)sums.high, (__m256i)both.high)};
}
#endif

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

// acc[i] + w[i][0]·a[0] + w[i][1]·a[1] over the two bfloat16 of each lane of w and of a.
inline F dot2(F acc, U w, uint32_t a) {
#if defined(__AVX512BF16__)
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)w, (__m512bh)_mm512_set1_epi32(int(a)));
#elif defined(TW_TWO)
  // Both numbers come from one broadcast load: single ones would be moved from general registers.
  const __m256i both = _mm256_set1_epi32(int(a));
  const F::Half even = (F::Half)_mm256_slli_epi32(both, 16);
  const F::Half odd = (F::Half)_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000)));
  acc = fma(as_float(w << 16), F{even, even}, acc);
  return fma(as_float(w & 0xffff0000u), F{odd, odd}, acc);
#else
  acc = fma(as_float(w << 16), splat(widen(uint16_t(a))), acc);
  return fma(as_float(w & 0xffff0000u), splat(widen(uint16_t(a >> 16))), acc);
#endif
}

}  // namespace TW_ISA
