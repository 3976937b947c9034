// Arm's matrix instructions for bytes: two rows of activations times a block of packed weights. Empty where the target
// has none.
#pragma once

#include <cstdint>

#if defined(TW_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
#define TW_MATRICES 1
#endif

#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

#if defined(TW_MATRICES)

// Eight inputs of two features in each, of two lines of a panel with four inputs of sixteen features.
inline void put_side_by_side(U low, U high, uint8x16_t (&out)[8]) {
  const auto two = [](U::Quarter l, U::Quarter h, uint8x16_t* to) {
    to[0] = vreinterpretq_u8_u32(vzip1q_u32((uint32x4_t)l, (uint32x4_t)h));
    to[1] = vreinterpretq_u8_u32(vzip2q_u32((uint32x4_t)l, (uint32x4_t)h));
  };
  two(low.a, high.a, out), two(low.b, high.b, out + 2), two(low.c, high.c, out + 4), two(low.d, high.d, out + 6);
}

// out[r] = Σ w · a[r] over `depth` inputs, a multiple of eight: unsigned bytes of a block of sixteen features at `w`, and
// signed ones of rows that are `stride` bytes apart.
//
// A product of two features and two rows gives four sums, a feature's two side by side.
template <int ROWS>
inline void multiply_pairs(const int8_t* a, int64_t stride, const char* w, int64_t depth, I (&out)[ROWS][1]) {
  static_assert(ROWS % 2 == 0);
  constexpr int PAIRS = ROWS / 2;
  int32x4_t sum[PAIRS][8];
  for (int p = 0; p < PAIRS; p++)
    for (int i = 0; i < 8; i++) sum[p][i] = vdupq_n_s32(0);
  for (int64_t k = 0; k < depth; k += 8, w += tw::PANEL * 8) {
    uint8x16_t weight[8];
    put_side_by_side(load<U>(w), load<U>(w + tw::PANEL * 4), weight);
    for (int p = 0; p < PAIRS; p++) {
      const int8_t* row = a + 2 * p * stride + k;
      const int8x16_t two = vcombine_s8(vld1_s8(row), vld1_s8(row + stride));
      for (int i = 0; i < 8; i++) sum[p][i] = vusmmlaq_s32(sum[p][i], weight[i], two);
    }
  }
  for (int p = 0; p < PAIRS; p++) {
    const auto& s = sum[p];
    out[2 * p][0] = {(I::Quarter)vuzp1q_s32(s[0], s[1]), (I::Quarter)vuzp1q_s32(s[2], s[3]),
                     (I::Quarter)vuzp1q_s32(s[4], s[5]), (I::Quarter)vuzp1q_s32(s[6], s[7])};
    out[2 * p + 1][0] = {(I::Quarter)vuzp2q_s32(s[0], s[1]), (I::Quarter)vuzp2q_s32(s[2], s[3]),
                         (I::Quarter)vuzp2q_s32(s[4], s[5]), (I::Quarter)vuzp2q_s32(s[6], s[7])};
  }
}

#endif

}  // namespace TW_ISA
