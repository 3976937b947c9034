// What the compiler's vectors cannot say, for Arm: NEON alone, or with products of bytes (dotprod), of unsigned by
// signed bytes and their matrices (i8mm), or of bfloat16 (bf16).
//
// All but the products of bfloat16 computes the same bits as the generic code in vec.h.
#pragma once

#include "lanes_arm.h"

namespace TW_ISA {

inline F fma(F a, F b, F c) {
  const auto one = [](auto x, auto y, auto z) { return vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y); };
  return by_quarters<F>(one, a, b, c);
}

// Ties to even; NaN is 0.
inline I round_to_int(F x) {
  return by_quarters<I>([](auto q) { return vcvtnq_s32_f32((float32x4_t)q); }, x);
}

inline float sum(F x) { return vaddvq_f32((float32x4_t)((x.a + x.c) + (x.b + x.d))); }

// Of what is a number.
inline float largest(F x) {
  const auto two = [](auto y, auto z) { return vmaxnmq_f32((float32x4_t)y, (float32x4_t)z); };
  return vmaxnmvq_f32(two(two(x.a, x.c), two(x.b, x.d)));
}

inline F load_f32(const uint16_t* p) {
  const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
  return {(F::Quarter)vshll_n_u16(vget_low_u16(low), 16), (F::Quarter)vshll_high_n_u16(low, 16),
          (F::Quarter)vshll_n_u16(vget_low_u16(high), 16), (F::Quarter)vshll_high_n_u16(high, 16)};
}

inline F wide_halves(uint16x8_t low, uint16x8_t high) {
  const float16x8_t l = vreinterpretq_f16_u16(low), h = vreinterpretq_f16_u16(high);
  return {(F::Quarter)vcvt_f32_f16(vget_low_f16(l)), (F::Quarter)vcvt_high_f32_f16(l),
          (F::Quarter)vcvt_f32_f16(vget_low_f16(h)), (F::Quarter)vcvt_high_f32_f16(h)};
}

inline F load_f32(const Half* p) {
  return wide_halves(vld1q_u16((const uint16_t*)p), vld1q_u16((const uint16_t*)p + 8));
}

// Thirty-two float16, two in each lane.
inline void from_halves(U x, F (&out)[2]) {
  out[0] = wide_halves((uint16x8_t)x.a, (uint16x8_t)x.b);
  out[1] = wide_halves((uint16x8_t)x.c, (uint16x8_t)x.d);
}

// The first eight of sixteen, each two times, and the last eight.
inline void twice(F x, F (&out)[2]) {
  const auto both = [](F::Quarter low, F::Quarter high) {
    const float32x4_t l = (float32x4_t)low, h = (float32x4_t)high;
    return F{(F::Quarter)vzip1q_f32(l, l), (F::Quarter)vzip2q_f32(l, l), (F::Quarter)vzip1q_f32(h, h),
             (F::Quarter)vzip2q_f32(h, h)};
  };
  out[0] = both(x.a, x.b), out[1] = both(x.c, x.d);
}

inline I small_integers(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {(I::Quarter)vmovl_s16(vget_low_s16(low)), (I::Quarter)vmovl_high_s16(low),
          (I::Quarter)vmovl_s16(vget_low_s16(high)), (I::Quarter)vmovl_high_s16(high)};
}

inline void store_f32(uint16_t* p, F x) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const auto two = [](F::Quarter low, F::Quarter high) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high));
  };
  vst1q_u16(p, two(x.a, x.b));
  vst1q_u16(p + 8, two(x.c, x.d));
#else
  const U bits = as_bits(x), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const U all = select(magnitude(x) > 0x7f800000, bits | 0x400000u, rounded);
  vst1q_u16(p, vshrn_high_n_u32(vshrn_n_u32((uint32x4_t)all.a, 16), (uint32x4_t)all.b, 16));
  vst1q_u16(p + 8, vshrn_high_n_u32(vshrn_n_u32((uint32x4_t)all.c, 16), (uint32x4_t)all.d, 16));
#endif
}

inline void store_f32(Half* p, F x) {
  const auto two = [](F::Quarter low, F::Quarter high) {
    return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)low), (float32x4_t)high));
  };
  vst1q_u16((uint16_t*)p, two(x.a, x.b));
  vst1q_u16((uint16_t*)p + 8, two(x.c, x.d));
}

inline void store_s8(int8_t* p, I x) {
  const int16x8_t low = vqmovn_high_s32(vqmovn_s32((int32x4_t)x.a), (int32x4_t)x.b);
  const int16x8_t high = vqmovn_high_s32(vqmovn_s32((int32x4_t)x.c), (int32x4_t)x.d);
  vst1q_s8(p, vqmovn_high_s16(vqmovn_s16(low), high));
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int32_t TAKEN = 0;
inline U taken(U w) { return w; }
#else
constexpr int32_t TAKEN = 128;
inline U taken(U w) { return w ^ 0x80808080u; }
#endif

template <bool SMALL>
inline I dot4(I acc, U w, int32_t a) {
  const int8x16_t as = vreinterpretq_s8_s32(vdupq_n_s32(a));
  const auto one = [&](auto sums, auto bytes) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32((int32x4_t)sums, (uint8x16_t)bytes, as);
#elif defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32((int32x4_t)sums, (int8x16_t)bytes, as);
#else
    // Two products of bytes fit 16 bits, because no activation is -128.
    const int8x16_t ws = (int8x16_t)bytes;
    const int16x8_t low = vmull_s8(vget_low_s8(ws), vget_low_s8(as)), high = vmull_high_s8(ws, as);
    return vpadalq_s16((int32x4_t)sums, vpaddq_s16(low, high));
#endif
  };
  return by_quarters<I>(one, acc, w);
}

inline I multiply_add(I acc, I x, I m) { return acc + x * ((I)((U)m << 16) >> 16); }

inline U scaled_bytes(U x, U m, U shift) {
  const auto one = [](auto bytes, auto times, auto more) {
    const uint8x16_t low = (uint8x16_t)times;
    return vmlaq_u8((uint8x16_t)more, (uint8x16_t)bytes, vtrn1q_u8(low, low));
  };
  return by_quarters<U>(one, x, m, shift);
}

inline F dot2(F acc, U w, uint32_t a) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x8_t as = vreinterpretq_bf16_u32(vdupq_n_u32(a));
  const auto one = [&](auto sums, auto pairs) {
    return vbfdotq_f32((float32x4_t)sums, vreinterpretq_bf16_u32((uint32x4_t)pairs), as);
  };
  return by_quarters<F>(one, acc, w);
#else
  acc = fma(as_float(w << 16), splat(widen(uint16_t(a))), acc);
  return fma(as_float(w & 0xffff0000u), splat(widen(uint16_t(a >> 16))), acc);
#endif
}

}  // namespace TW_ISA
