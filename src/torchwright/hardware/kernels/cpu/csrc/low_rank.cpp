// Low-rank adapters: y += B A x for some rows, with both matrices in bfloat16.
//
// A row's result depends on its own row alone: sums have one order, whatever the number of rows.
#include <algorithm>

#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

// MR rows against sixteen ranks. Four sums a row, of every fourth pair of inputs, hide the latency of the products.
template <int MR>
inline void shrink_rows(const tw::LowRankTask& t, int64_t first, int64_t block) {
  constexpr int SUMS = 4;
  const uint16_t* x[MR];
  for (int r = 0; r < MR; r++) x[r] = t.x + t.rows[first + r] * t.width;
  const char* w = (const char*)t.a + block * ((t.width + 1) / 2) * 64;
  F sum[SUMS][MR];
  for (int n = 0; n < SUMS; n++)
    for (int r = 0; r < MR; r++) sum[n][r] = F{};
  int64_t k = 0;
  for (; k + 2 * SUMS <= t.width; k += 2 * SUMS)
    for (int n = 0; n < SUMS; n++, w += 64) {
      const U weight = load<U>(w);
      if constexpr (MR == 1) __builtin_prefetch(w + AHEAD);
      for (int r = 0; r < MR; r++) sum[n][r] = dot2(sum[n][r], weight, read<uint32_t>(x[r] + k + 2 * n));
    }
  for (; k < t.width; k += 2, w += 64) {
    const U weight = load<U>(w);
    for (int r = 0; r < MR; r++)
      sum[0][r] = dot2(sum[0][r], weight, k + 1 < t.width ? read<uint32_t>(x[r] + k) : uint32_t(x[r][k]));
  }
  for (int r = 0; r < MR; r++)
    store_f32(t.middle + (first + r) * t.ranks + block * LANES, (sum[0][r] + sum[1][r]) + (sum[2][r] + sum[3][r]));
}

// Sixteen ranks of A x, for rows `begin` to `end`.
void low_rank_shrink(const tw::LowRankTask& t, int64_t begin, int64_t end, int64_t block) {
  for (; begin + 4 <= end; begin += 4) shrink_rows<4>(t, begin, block);
  for (; begin < end; begin++) shrink_rows<1>(t, begin, block);
}

// y += B (A x) of all rows, blocks `begin` to `end` of sixteen output features.
void low_rank_expand(const tw::LowRankTask& t, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; block++) {
    const tw::LowRankBlock& b = t.blocks[block];
    const int64_t feature = block * LANES, rest = t.features - feature;
    for (int64_t pair = 0; pair < b.pairs; pair++) __builtin_prefetch((const char*)b.weight + pair * 64 + AHEAD);
    for (int64_t row = 0; row < t.count; row++) {
      const uint16_t* h = t.middle + row * t.ranks + b.first;
      F sum = F{};
      for (int64_t pair = 0; pair < b.pairs; pair++)
        sum = dot2(sum, load<U>(b.weight + pair * 2 * LANES), read<uint32_t>(h + 2 * pair));
      uint16_t* y = t.y + t.rows[row] * t.features + feature;
      put(y, load_some(y, rest) + sum, rest);
    }
  }
}

}  // namespace TW_ISA
