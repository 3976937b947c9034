// bfloat16 and float16 as their 16 bits, one number at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace TW_ISA {

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

}  // namespace TW_ISA
