// 4-bit integers in groups as the left operand of AMX tiles, and how they are made bfloat16. Empty where the target has
// no tiles.
//
// A tile has 16 output features by 32 inputs, and the inputs of a feature lie next to each other. The sixteen weights
// that a feature can have in a group are then half a register, and one permutation widens 32 of its integers.
//
// A panel has, group after group, the scales of its features and their offsets (or zeros, tw::Layout). Then, block by
// block of 16 features and step by step of 32 inputs, four lines: word w of line i is input w of the step, and nibble j
// of the word is feature 4 i + j of the block.
#pragma once

#include "amx.h"
#include "codes.h"
#include "kernels.h"
#include "vec.h"

#if defined(TW_AMX)
namespace TW_ISA {

using tw::TILE_INPUTS;

constexpr int64_t TILE = 1024, CODES = 256;  // bytes of a tile and of its integers

// Words shifted right, by a product: shifts share the only port of permutations, products do not (a fifth of the time).
template <int BITS>
inline __m512i shifted(__m512i words) {
  return _mm512_mulhi_epu16(words, _mm512_set1_epi16(1 << (16 - BITS)));
}

// The tiles of `steps` steps of one group and block, `apart` bytes from one to the next.
//
// A register has the weights of two features, 0 and 2 or 1 and 3 of a line: bit 4 of an integer, which permutations read
// as well, chooses between them.
inline void widen_block(const float* scales, const float* offsets, const char* codes, int64_t steps, char* to,
                        int64_t apart) {
  const __m512 whole = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i nibbles = _mm512_set1_epi16(0x0f0f), second = _mm512_set1_epi16(0x1000);
  const auto weights_of = [&](int f) {
    return _mm512_fmadd_ps(whole, _mm512_set1_ps(scales[f]), _mm512_set1_ps(offsets[f]));
  };
  __m512i weights[TILE_ROWS / 2];
#pragma GCC unroll 8
  for (int i = 0; i < TILE_ROWS / 2; i++) {
    const int f = i / 2 * 4 + i % 2;
    weights[i] = (__m512i)_mm512_cvtne2ps_pbh(weights_of(f + 2), weights_of(f));
  }
  for (int64_t step = 0; step < steps; step++, codes += CODES, to += apart)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      ask_ahead(codes + i * 64);
      const __m512i words = _mm512_loadu_si512(codes + i * 64);
      // Features 0 and 2, and 1 and 3, each in a byte: (words & nibbles) | second.
      const __m512i even = _mm512_ternarylogic_epi32(words, nibbles, second, 0xea);
      const __m512i odd = _mm512_ternarylogic_epi32(shifted<4>(words), nibbles, second, 0xea);
      char* at = to + i * 256;
      _mm512_store_si512(at, _mm512_permutexvar_epi16(even, weights[2 * i]));
      _mm512_store_si512(at + 64, _mm512_permutexvar_epi16(odd, weights[2 * i + 1]));
      _mm512_store_si512(at + 128, _mm512_permutexvar_epi16(shifted<8>(even), weights[2 * i]));
      _mm512_store_si512(at + 192, _mm512_permutexvar_epi16(shifted<8>(odd), weights[2 * i + 1]));
    }
}

// A panel's groups. Sizes are worked out once: a division takes as long as widening a tile.
struct TiledGroups {
  const char* weight;
  bool is_short;
  int64_t steps, head, bytes, count;  // of a group, and how many groups a panel has
  explicit TiledGroups(const LinearTask& t)
      : weight((const char*)t.weight),
        is_short(t.layout == tw::Layout::short_tiles),
        steps(t.group / TILE_INPUTS),
        head(PANEL * tw::head_bytes(4, false, t.layout)),
        bytes(tw::grouped_bytes(t.group, 4, false, t.layout)),
        count(t.depth / t.group) {}
  const char* at(int64_t panel, int64_t group) const { return weight + (panel * count + group) * bytes; }

  // A group's scales and offsets in float32, in `room` where they are short.
  const float* heads(const char* group, float* room) const {
    for (int64_t line = 0; line < head; line += 64) ask_ahead(group + line);
    if (!is_short) return (const float*)group;
    for (int64_t f = 0; f < PANEL; f += LANES) {
      const F scale = load_f32((const Half*)group + f);
      const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(group + 2 * PANEL + f)));
      store(room + f, scale);
      store(room + PANEL + f, (F)_mm512_fnmadd_ps(_mm512_cvtepi32_ps(zero), (__m512)scale, _mm512_setzero_ps()));
    }
    return room;
  }

  // Some steps of a group's block from `step` on, as tiles that lie `apart` bytes from one step to the next.
  void widen(const char* group, const float* heads, int64_t block, int64_t step, int64_t some, char* to,
             int64_t apart) const {
    heads += block * TILE_ROWS;
    widen_block(heads, heads + PANEL, group + head + (block * steps + step) * CODES, some, to, apart);
  }
};

}  // namespace TW_ISA
#endif
