// Numbers of 4 and 8 bits in groups, and how some of a panel are made the bfloat16 of a bf16 panel.
//
// A group begins with what its numbers share, for each of PANEL features (kernels.h). A weight is rounded to bfloat16
// once: a layer's results are to the bit those of its weights in bfloat16.
#pragma once

#include "amx.h"
#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::PANEL;

constexpr int BLOCKS = PANEL / LANES;
// Bytes to prefetch ahead in a panel that comes from memory: what a core has under way at its bandwidth and latency.
constexpr int AHEAD = 3072;

// The same for numbers that are widened, 4 KB at most at a time: what comes next arrives while tiles multiply.
inline void ask_ahead(const char* from) {
#if defined(TW_AMX)
  __builtin_prefetch(from + 4096, 0, 2);
#else
  __builtin_prefetch(from + AHEAD);
#endif
}

// Integer · scale + offset, the scales of all features before the offsets.
//
// Value j of lane i of a 32-bit word is that of feature 8 · (j % 2) + i / 2 and input 2 · (j / 2) + i % 2, so that
// sixteen of a kind are half a line of a bfloat16 panel.
template <int BITS_>
struct WholeNumber {
  static constexpr int BITS = BITS_, VALUES = 32 / BITS;
  static constexpr bool FLOATS = false;

  static inline char* widen(const char* head, const char* from, int64_t depth, char* out) {
    const float* scales = (const float*)head;
    F scale[BLOCKS][2], offset[BLOCKS][2];
    for (int b = 0; b < BLOCKS; b++) {
      twice(load<F>(scales + b * LANES), scale[b]);
      twice(load<F>(scales + PANEL + b * LANES), offset[b]);
    }
    for (int64_t k = 0; k < depth; k += VALUES, from += PANEL * 4, out += VALUES * PANEL * 2)
      for (int b = 0; b < BLOCKS; b++) {
        ask_ahead(from + b * 64);
        const U words = load<U>(from + b * 64);
        for (int j = 0; j < VALUES; j += 2) {
          const F low = fma(value(words, j), scale[b][0], offset[b][0]);
          const F high = fma(value(words, j + 1), scale[b][1], offset[b][1]);
          store_pair((uint16_t*)(out + j / 2 * PANEL * 4 + b * 64), low, high);
        }
      }
    return out;
  }

 private:
  static inline F value(U words, int j) { return to_float((I)((words >> (BITS * j)) & ((1u << BITS) - 1))); }
};

// 4-bit floats (sign, two bits of exponent, one of mantissa) times 2^(e - 127), where each feature has a byte e.
//
// A feature's word is two halves, of even and of odd inputs, each with four numbers from the lowest bits on: line j of
// a bfloat16 panel is number j of all halves.
struct E2M1 {
  static constexpr int BITS = 4;
  static constexpr bool FLOATS = true;

  static inline char* widen(const char* head, const char* from, int64_t depth, char* out) {
    U base[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) {
      // The bits of 0.5 · 2^(e - 127) as bfloat16.
      const U least = ((U)small_integers((const int8_t*)head + b * LANES) & 0xffu) - 1u;
      base[b] = (least << 7) | (least << 23);
    }
    for (int64_t k = 0; k < depth; k += 8, from += PANEL * 4, out += 8 * PANEL * 2)
      for (int b = 0; b < BLOCKS; b++) {
        ask_ahead(from + b * 64);
        const U words = load<U>(from + b * 64);
        for (int j = 0; j < 4; j++) store(out + j * PANEL * 4 + b * 64, wide(words >> (4 * j), base[b]));
      }
    return out;
  }

 private:
  // Of the lowest four bits of each half. From 1.0 on a number's bits follow each other in steps of half an octave;
  // below are 0.5, the base itself, and zero.
  static inline U wide(U halves, U base) {
#if defined(__AVX512BW__)
    const __m512i steps = _mm512_broadcast_i64x4(
        _mm256_setr_epi16(0, 0, 0x80, 0xc0, 0x100, 0x140, 0x180, 0x1c0, -0x8000, -0x8000, -0x7f80, -0x7f40, -0x7f00,
                          -0x7ec0, -0x7e80, -0x7e40));
    const __mmask32 some = _mm512_test_epi16_mask((__m512i)halves, _mm512_set1_epi16(7));
    return (U)_mm512_maskz_add_epi16(some, _mm512_permutexvar_epi16((__m512i)halves, steps), (__m512i)base);
#else
    const U size = halves & 0x00070007u;
    const U normal = ((size >> 1) | (size >> 2)) & 0x00010001u;  // 1.0 and more
    const U odd = size & 0x00010001u;
    const U some = normal | odd, whole = (some << 16) - some;  // all bits of the halves that are not zero
    const U bits = base + (size << 6) - ((odd - (odd & normal)) << 6);
    return (bits | ((halves & 0x00080008u) << 12)) & whole;
#endif
  }
};

// 8-bit floats (e4m3: sign, four bits of exponent, three of mantissa) times a float32 scale of each feature.
//
// A feature's word is two halves, of even and of odd inputs; a half has a number of the first of two lines of a bfloat16
// panel and one of the second, their bits where they are cheap to use:
//
//   bit    15     14 12      11      10  7      6  3      2  0
//          sign'  mantissa'  sign    exponent'  exponent  mantissa
struct E4M3 {
  static constexpr int BITS = 8;
  static constexpr bool FLOATS = true;

  static inline char* widen(const char* head, const char* from, int64_t depth, char* out) {
#if defined(__AVX512BW__)
    if (shared((const float*)head)) return widen_shared(*(const float*)head, from, depth, out);
#endif
    F scale[BLOCKS][2];  // times 256: as float16 a number is as many times smaller
    for (int b = 0; b < BLOCKS; b++) twice(load<F>((const float*)head + b * LANES), scale[b]);
    for (int64_t k = 0; k < depth; k += 4, from += PANEL * 4, out += 4 * PANEL * 2)
      for (int b = 0; b < BLOCKS; b++) {
        ask_ahead(from + b * 64);
        const U w = load<U>(from + b * 64);
        line(((w & 0x007f007fu) << 7) | ((w & 0x08000800u) << 4), scale[b], out + b * 64);
        line((w & 0x80008000u) | ((w & 0x07800780u) << 3) | ((w & 0x70007000u) >> 5), scale[b],
             out + PANEL * 4 + b * 64);
      }
    return out;
  }

 private:
  static inline void line(U halves, const F (&scale)[2], char* out) {
    F value[2];
    from_halves(halves, value);
    store_pair((uint16_t*)out, value[0] * scale[0], value[1] * scale[1]);
  }

#if defined(__AVX512BW__)
  // One scale for all features, as in blocks of 128 x 128, far from the ends of bfloat16: then a number's mantissa alone
  // says how its product is rounded, and eight products are all that there are but for their exponents.
  static inline bool shared(const float* scales) {
    const F first = splat(scales[0]);
    for (int b = 0; b < BLOCKS; b++)
      if (_mm512_cmpneq_ps_mask((__m512)load<F>(scales + b * LANES), (__m512)first)) return false;
    return scales[0] > 0x1p-100f && scales[0] < 0x1p100f;
  }

  static inline char* widen_shared(float scale, const char* from, int64_t depth, char* out) {
    alignas(64) uint16_t normal[32], least[32];  // by the lowest three of five bits; `least` where the exponent is 0
    const F part = to_float(I{0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7}) * 0.125f;
    const F of_whole = (part + 1.0f) * 0x1p-15f * splat(scale), of_part = part * 0x1p-14f * splat(scale);
    for (int i = 0; i < 32; i += LANES) store_f32(normal + i, of_whole), store_f32(least + i, of_part);
    const __m512i of_normal = _mm512_load_si512(normal), of_least = _mm512_load_si512(least);
    const __m512i power = _mm512_set1_epi16(0x0780), signed_power = _mm512_set1_epi16(int16_t(0x8780));
    // `mantissa` in the lowest bits, sign and exponent in `rest` where a bfloat16 has them.
    const auto line = [&](__m512i mantissa, __m512i rest, char* to) {
      const __m512i product = _mm512_permutexvar_epi16(mantissa, of_normal);
      const __mmask32 small = _mm512_testn_epi16_mask(rest, power);
      const __m512i size = _mm512_mask_permutexvar_epi16(product, small, mantissa, of_least);
      _mm512_storeu_si512(to, _mm512_add_epi16(size, _mm512_and_si512(rest, signed_power)));
    };
    for (int64_t k = 0; k < depth; k += 4, from += PANEL * 4, out += 4 * PANEL * 2)
      for (int b = 0; b < BLOCKS; b++) {
        ask_ahead(from + b * 64);
        const __m512i w = _mm512_loadu_si512(from + b * 64);
        line(w, _mm512_slli_epi16(w, 4), out + b * 64);
        line(_mm512_srli_epi16(w, 12), w, out + PANEL * 4 + b * 64);
      }
    return out;
  }
#endif
};

}  // namespace TW_ISA
