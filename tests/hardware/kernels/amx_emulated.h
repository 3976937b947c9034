// AMX tiles in plain C++, for machines that have none: `scripts/kernel_builds.py tiles` includes this before the kernels.
//
// What the processor would refuse (shapes that do not fit, registers before they were shaped) ends the process. After
// Intel's Architecture Instruction Set Extensions reference: LDTILECFG, TILELOADD, TILESTORED, TDPBSUD, TDPBF16PS.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_INT8__ 1
#define __AMX_BF16__ 1

namespace emulated {

struct Tile {
  int rows = 0, bytes = 0;
  alignas(64) unsigned char at[16][64] = {};
};

struct Registers {
  bool shaped = false;
  Tile tile[8];
};

inline Registers& registers() {
  static thread_local Registers mine;
  return mine;
}

inline void insist(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX would fault: %s\n", what);
  std::abort();
}

inline Tile& tile(int i) {
  insist(registers().shaped, "tiles were not shaped");
  insist(registers().tile[i].rows && registers().tile[i].bytes, "a tile without a shape");
  return registers().tile[i];
}

inline void load_shapes(const void* from) {
  const auto* bytes = (const unsigned char*)from;
  insist(bytes[0] == 1 && bytes[1] == 0, "palette");
  registers() = Registers{};
  registers().shaped = true;
  for (int i = 0; i < 8; i++) {
    uint16_t width;
    std::memcpy(&width, bytes + 16 + 2 * i, 2);
    insist(width <= 64 && bytes[48 + i] <= 16 && !width == !bytes[48 + i], "a shape that is none");
    registers().tile[i].rows = bytes[48 + i];
    registers().tile[i].bytes = width;
  }
}

inline void load(int i, const void* from, int64_t stride) {
  Tile& to = tile(i);
  std::memset(to.at, 0, sizeof to.at);
  for (int r = 0; r < to.rows; r++) std::memcpy(to.at[r], (const char*)from + r * stride, to.bytes);
}

inline void store(int i, void* to, int64_t stride) {
  const Tile& from = tile(i);
  for (int r = 0; r < from.rows; r++) std::memcpy((char*)to + r * stride, from.at[r], from.bytes);
}

inline void zero(int i) { std::memset(tile(i).at, 0, sizeof tile(i).at); }

inline void check(const Tile& c, const Tile& a, const Tile& b) {
  insist(a.rows == c.rows && b.bytes == c.bytes && b.rows == a.bytes / 4 && a.bytes % 4 == 0 && b.bytes % 4 == 0,
         "shapes that do not fit each other");
}

// Signed bytes of the first, unsigned ones of the second.
inline void multiply_bytes(int sums, int rows, int weights) {
  Tile &c = tile(sums), &a = tile(rows), &b = tile(weights);
  check(c, a, b);
  for (int m = 0; m < c.rows; m++)
    for (int n = 0; n < c.bytes / 4; n++) {
      uint32_t sum;  // wraps, as the processor's does
      std::memcpy(&sum, c.at[m] + 4 * n, 4);
      for (int k = 0; k < a.bytes; k++) sum += uint32_t(int8_t(a.at[m][k]) * int(b.at[k / 4][4 * n + k % 4]));
      std::memcpy(c.at[m] + 4 * n, &sum, 4);
    }
}

inline float widen(const unsigned char* at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  const uint32_t bits = (half & 0x7f80) ? uint32_t(half) << 16 : uint32_t(half & 0x8000) << 16;  // denormals are zero
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Even and odd products are summed apart, and their sum is added once.
inline void multiply_bfloat16(int sums, int rows, int weights) {
  Tile &c = tile(sums), &a = tile(rows), &b = tile(weights);
  check(c, a, b);
  for (int m = 0; m < c.rows; m++)
    for (int n = 0; n < c.bytes / 4; n++) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < a.bytes / 4; k++) {
        even += widen(a.at[m] + 4 * k) * widen(b.at[k] + 4 * n);
        odd += widen(a.at[m] + 4 * k + 2) * widen(b.at[k] + 4 * n + 2);
      }
      std::memcpy(&sum, c.at[m] + 4 * n, 4);
      sum += even + odd;
      std::memcpy(c.at[m] + 4 * n, &sum, 4);
    }
}

inline void release() { registers() = Registers{}; }

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated::load_shapes(from)
#define _tile_release() emulated::release()
#define _tile_loadd(i, from, stride) emulated::load(i, from, stride)
#define _tile_stored(i, to, stride) emulated::store(i, to, stride)
#define _tile_zero(i) emulated::zero(i)
#define _tile_dpbsud(c, a, b) emulated::multiply_bytes(c, a, b)
#define _tile_dpbf16ps(c, a, b) emulated::multiply_bfloat16(c, a, b)
