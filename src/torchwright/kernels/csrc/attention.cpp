// Attention of some query rows over the pages of one sequence and one key/value head.
//
// Keys are taken in spans of four pages, counted from the start of the sequence, with a running softmax; a span in
// which a row sees nothing changes that row by nothing, to the bit. So a row's result depends neither on the rows it
// is computed beside nor on how the prompt was cut.
#include <cmath>

#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::AttentionTask;
using tw::LARGEST_HEAD;
using tw::PAGE;
using tw::Type;

constexpr int PAGES = 4, SPAN = PAGES * PAGE, ROWS = 4;
constexpr float NOTHING = -1e30f;

struct Row {
  int64_t first, last;  // keys that it sees: [first, last)
  float peak = NOTHING, total = 0;
};

// The query rows of a tile in the types that the products want, and what is accumulated for them.
struct Tile {
  alignas(64) float q[ROWS][LARGEST_HEAD];
  alignas(64) uint16_t q_bf16[ROWS][LARGEST_HEAD];
  alignas(64) float out[ROWS][LARGEST_HEAD];
  alignas(64) float p[ROWS][SPAN];
  alignas(64) uint16_t p_bf16[ROWS][SPAN];
  Row rows[ROWS];
};

template <class KV>
struct Pages {
  const KV* of(const void* all, const AttentionTask& t, int64_t page) const {
    return (const KV*)all + (t.table[page] * t.kv_heads + t.kv_head) * PAGE * t.head_size;
  }
};

// Scores of ROWS rows against `count` pages from `page` on.
template <int R, class KV>
inline void scores(const AttentionTask& t, const Tile& tile, int64_t page, int count, F (&s)[R][PAGES]) {
  const KV* k[PAGES];
  for (int p = 0; p < PAGES; p++) k[p] = Pages<KV>().of(t.k, t, page + (p < count ? p : 0));
  for (int r = 0; r < R; r++)
    for (int p = 0; p < PAGES; p++) s[r][p] = F{};
  if constexpr (sizeof(KV) == 2) {
    for (int64_t d = 0; d < t.head_size; d += 2)
      for (int p = 0; p < PAGES; p++) {
        const U keys = load<U>(k[p] + d * PAGE);
        for (int r = 0; r < R; r++) s[r][p] = dot2(s[r][p], keys, read<uint32_t>(tile.q_bf16[r] + d));
      }
  } else {
    for (int64_t d = 0; d < t.head_size; d++)
      for (int p = 0; p < PAGES; p++) {
        const F keys = load_f32(k[p] + d * PAGE);
        for (int r = 0; r < R; r++) s[r][p] = fma(keys, splat(tile.q[r][d]), s[r][p]);
      }
  }
  if constexpr (sizeof(KV) == 1) {
    for (int p = 0; p < count; p++) {
      const F scale = load<F>(t.k_scale + (t.table[page + p] * t.kv_heads + t.kv_head) * PAGE);
      for (int r = 0; r < R; r++) s[r][p] = s[r][p] * scale;
    }
  }
}

// Turns scores into weights, keeps the running maximum and sum; returns what the row's output shrinks by.
inline float soften(const AttentionTask& t, Row& row, int64_t key, int count, F (&s)[PAGES], float* p, uint16_t* p16) {
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  I seen[PAGES];
  float peak = row.peak;
  for (int i = 0; i < PAGES; i++) {
    const I at = lane + int32_t(key + i * PAGE);
    seen[i] = (at >= int32_t(row.first)) & (at < int32_t(row.last));
    if (i >= count) seen[i] = I{};
    s[i] = s[i] * t.scale;
    if (t.soft_cap > 0) s[i] = tanh(s[i] / t.soft_cap) * t.soft_cap;
    s[i] = seen[i] ? s[i] : splat(NOTHING);
    peak = std::fmax(peak, largest(s[i]));
  }
  const float shrink = peak > row.peak ? exp(splat(row.peak - peak))[0] : 1.0f;
  F total = F{};
  for (int i = 0; i < PAGES; i++) {
    const F weight = seen[i] ? exp(s[i] - peak) : F{};
    total = total + weight;
    store(p + i * PAGE, weight);
    store_f32(p16 + i * PAGE, weight);
  }
  row.total = row.total * shrink + sum(total);
  row.peak = peak;
  return shrink;
}

template <int R, int B, class KV>
inline void weigh(const AttentionTask& t, Tile& tile, int64_t page, int64_t keys, int64_t d, const float* shrink) {
  F acc[R][B];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) acc[r][b] = load<F>(tile.out[r] + d + b * LANES) * splat(shrink[r]);
  for (int64_t j = 0; j < keys; j += sizeof(KV) == 2 ? 2 : 1) {
    const KV* v = Pages<KV>().of(t.v, t, page + j / PAGE);
    if constexpr (sizeof(KV) == 2) {
      v += (j % PAGE) * t.head_size + d * 2;
      // Beyond the context a page holds whatever it held; zero weights alone would not silence a NaN there.
      const U mask = U{} + (j + 1 < keys ? 0xffffffffu : 0xffffu);
      for (int b = 0; b < B; b++) {
        const U pair = load<U>(v + b * LANES * 2) & mask;
        for (int r = 0; r < R; r++) acc[r][b] = dot2(acc[r][b], pair, read<uint32_t>(tile.p_bf16[r] + j));
      }
    } else {
      v += (j % PAGE) * t.head_size + d;
      for (int b = 0; b < B; b++) {
        const F value = load_f32(v + b * LANES);
        for (int r = 0; r < R; r++) acc[r][b] = fma(value, splat(tile.p[r][j]), acc[r][b]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) store(tile.out[r] + d + b * LANES, acc[r][b]);
}

template <int R, class KV>
void run(const AttentionTask& t, Tile& tile) {
  int64_t first = tile.rows[0].first, last = tile.rows[0].last;
  for (int r = 1; r < R; r++) {
    first = tile.rows[r].first < first ? tile.rows[r].first : first;
    last = tile.rows[r].last > last ? tile.rows[r].last : last;
  }
  for (int64_t key = first / SPAN * SPAN; key < last; key += SPAN) {
    const int64_t page = key / PAGE, keys = last - key < SPAN ? last - key : SPAN;
    const int count = int((keys + PAGE - 1) / PAGE);
    F s[R][PAGES];
    scores<R, KV>(t, tile, page, count, s);
    float shrink[R];
    for (int r = 0; r < R; r++) {
      shrink[r] = soften(t, tile.rows[r], key, count, s[r], tile.p[r], tile.p_bf16[r]);
      if constexpr (sizeof(KV) == 1)
        for (int p = 0; p < count; p++) {
          const F scale = load<F>(t.v_scale + (t.table[page + p] * t.kv_heads + t.kv_head) * PAGE);
          const F weight = load<F>(tile.p[r] + p * PAGE);
          store(tile.p[r] + p * PAGE, weight * scale);
        }
    }
    int64_t d = 0;
    for (; d + 4 * LANES <= t.head_size; d += 4 * LANES) weigh<R, 4, KV>(t, tile, page, keys, d, shrink);
    for (; d < t.head_size; d += LANES) weigh<R, 1, KV>(t, tile, page, keys, d, shrink);
  }
}

template <int R>
void run_typed(const AttentionTask& t, Tile& tile) {
  if (t.kv_type == Type::f32) run<R, float>(t, tile);
  else if (t.kv_type == Type::bf16) run<R, uint16_t>(t, tile);
  else run<R, int8_t>(t, tile);
}

// Rows are (query, head of the group) pairs; `begin` and `end` count them for this sequence and key/value head.
void attention(const AttentionTask& t, int64_t begin, int64_t end) {
  const int64_t group = t.heads / t.kv_heads;
  Tile tile;
  for (int64_t from = begin; from < end; from += ROWS) {
    const int rows = int(end - from < ROWS ? end - from : ROWS);
    for (int r = 0; r < rows; r++) {
      const int64_t query = (from + r) / group, head = t.kv_head * group + (from + r) % group;
      const int64_t at = ((t.first_query + query) * t.heads + head) * t.head_size;
      for (int64_t d = 0; d < t.head_size; d++) {
        const float x = t.q_type == Type::f32 ? ((const float*)t.q)[at + d] : widen(((const uint16_t*)t.q)[at + d]);
        tile.q[r][d] = x;
        tile.q_bf16[r][d] = narrow(x);
        tile.out[r][d] = 0;
      }
      const int64_t position = t.context - t.queries + query;
      tile.rows[r] = Row{t.window > 0 && position >= t.window ? position - t.window + 1 : 0, position + 1};
    }
    switch (rows) {
      case 1: run_typed<1>(t, tile); break;
      case 2: run_typed<2>(t, tile); break;
      case 3: run_typed<3>(t, tile); break;
      default: run_typed<4>(t, tile);
    }
    for (int r = 0; r < rows; r++) {
      const int64_t query = (from + r) / group, head = t.kv_head * group + (from + r) % group;
      const int64_t at = ((t.first_query + query) * t.heads + head) * t.head_size;
      const float inverse = 1 / tile.rows[r].total;
      for (int64_t d = 0; d < t.head_size; d += LANES) {
        const F y = load<F>(tile.out[r] + d) * splat(inverse);
        if (t.q_type == Type::f32) store_f32((float*)t.out + at + d, y);
        else store_f32((uint16_t*)t.out + at + d, y);
      }
    }
  }
}

}  // namespace TW_ISA
