// Attention of some query rows over the pages of one sequence and one key/value head.
//
// Keys are taken in spans of four pages, counted from the start of the sequence, with a running softmax; a span in
// which a row sees nothing changes that row by nothing, to the bit. The softmax begins anew with every stretch of the
// sequence, and stretches are added up in their order, whether one thread has computed them or several. So a row's
// result depends neither on the rows it is computed beside nor on how the prompt was cut or the work divided. With AMX,
// both products of bfloat16 pages are tiles, for every number of rows.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "amx.h"
#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::AttentionTask;
using tw::LARGEST_HEAD;
using tw::PAGE;
using tw::Type;

constexpr int PAGES = 4, SPAN = PAGES * PAGE, ROWS = 4;
constexpr float NOTHING = -1e30f, LOG2_E = 1.44269504f;

struct Row {
  int64_t first, last;  // keys that it sees: [first, last)
  float peak = NOTHING, total = 0;
  const float* bias = nullptr;  // of key 0
  const float* sink = nullptr;  // a score beside the keys' with a value of zero
};

// What some rows have summed over stretches.
template <int ROWS>
struct Whole {
  Row rows[ROWS];
  alignas(64) float out[ROWS][LARGEST_HEAD];
};

// The query rows of a tile in the types that the products want, and what is accumulated for them.
struct Tile {
  alignas(64) float q[ROWS][LARGEST_HEAD];
  alignas(64) uint16_t q_bf16[ROWS][LARGEST_HEAD];
  alignas(64) float out[ROWS][LARGEST_HEAD];
  alignas(64) float p[ROWS][SPAN];
  alignas(64) uint16_t p_bf16[ROWS][SPAN];
  Row rows[ROWS];
  bool cold;  // its pages come from memory: the first rows of a decode step
};

template <class KV>
struct Pages {
  const KV* of(const void* all, const AttentionTask& t, int64_t page) const {
    return (const KV*)all + (t.table[page] * t.kv_heads + t.kv_head) * PAGE * t.head_size;
  }
};

// The page of the next span that lies where `page` does in this one; the last there is, at the end.
template <class KV>
inline const KV* ahead(const void* all, const AttentionTask& t, int64_t page) {
  return Pages<KV>().of(all, t, std::min(page + PAGES, (t.context - 1) / PAGE));
}

// Scores of ROWS rows against `count` pages from `page` on.
template <int R, class KV>
inline void scores(const AttentionTask& t, const Tile& tile, int64_t page, int count, F (&s)[R][PAGES]) {
  const KV *k[PAGES], *next[PAGES];
  for (int p = 0; p < PAGES; p++) k[p] = Pages<KV>().of(t.k, t, page + (p < count ? p : 0));
  for (int p = 0; p < PAGES; p++) next[p] = ahead<KV>(t.k, t, page + p);
  for (int r = 0; r < R; r++)
    for (int p = 0; p < PAGES; p++) s[r][p] = F{};
  if constexpr (sizeof(KV) == 2) {
    for (int64_t d = 0; d < t.head_size; d += 2)
      for (int p = 0; p < PAGES; p++) {
        const U keys = load<U>(k[p] + d * PAGE);
        if (tile.cold) __builtin_prefetch(next[p] + d * PAGE);
        for (int r = 0; r < R; r++) s[r][p] = dot2(s[r][p], keys, read<uint32_t>(tile.q_bf16[r] + d));
      }
  } else {
    for (int64_t d = 0; d < t.head_size; d++)
      for (int p = 0; p < PAGES; p++) {
        const F keys = load_f32(k[p] + d * PAGE);
        if (tile.cold) __builtin_prefetch(next[p] + d * PAGE);
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
  // In powers of two: a weight is 2^(s · scale · log2 e - peak).
  const float scale = t.soft_cap > 0 ? LOG2_E : t.scale * LOG2_E;
  const bool whole = row.first <= key && row.last >= key + SPAN;
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int i = 0; i < PAGES; i++) {
    if (t.soft_cap > 0) s[i] = tanh(s[i] * t.scale / t.soft_cap) * t.soft_cap;
    s[i] = s[i] * scale;
    if (row.bias) s[i] = fma(load<F>(row.bias + key + i * PAGE), splat(LOG2_E), s[i]);
    if (whole) continue;
    const I at = lane + int32_t(key + i * PAGE);
    const I seen = (at >= int32_t(row.first)) & (at < int32_t(row.last));
    s[i] = select(i < count ? seen : I{}, s[i], splat(NOTHING));
  }
  const float peak = std::fmax(row.peak, largest(max(max(s[0], s[1]), max(s[2], s[3]))));
  const float shrink = peak > row.peak ? exp2(splat(row.peak - peak))[0] : 1.0f;
  F total = F{};
  for (int i = 0; i < PAGES; i++) {
    // Where nothing has been seen yet, the peak is NOTHING too.
    const F seen = exp2(s[i] - peak), weight = whole ? seen : select(s[i] > NOTHING, seen, F{});
    total = total + weight;
    if (p) store(p + i * PAGE, weight);
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
    const int64_t at = (j % PAGE) * t.head_size + d * (sizeof(KV) == 2 ? 2 : 1);
    const KV* v = Pages<KV>().of(t.v, t, page + j / PAGE) + at;
    if (tile.cold) {
      const char* next = (const char*)(ahead<KV>(t.v, t, page + j / PAGE) + at);
      for (int b = 0; b < B; b++) __builtin_prefetch(next + b * LANES * (sizeof(KV) == 1 ? 1 : 4));
    }
    if constexpr (sizeof(KV) == 2) {
      // Beyond the context a page holds whatever it held; zero weights alone would not silence a NaN there.
      const U mask = U{} + (j + 1 < keys ? 0xffffffffu : 0xffffu);
      for (int b = 0; b < B; b++) {
        const U pair = load<U>(v + b * LANES * 2) & mask;
        for (int r = 0; r < R; r++) acc[r][b] = dot2(acc[r][b], pair, read<uint32_t>(tile.p_bf16[r] + j));
      }
    } else {
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
void run(const AttentionTask& t, Tile& tile, int64_t first, int64_t last) {
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
void run_typed(const AttentionTask& t, Tile& tile, int64_t first, int64_t last) {
  if (t.kv_type == Type::f32) run<R, float>(t, tile, first, last);
  else if (t.kv_type == Type::bf16) run<R, uint16_t>(t, tile, first, last);
  else run<R, int8_t>(t, tile, first, last);
}

#if defined(TW_AMX)

// Up to 16 rows on tiles. Registers 0 to 3 hold sums, 4 queries, 5 keys, 6 weights, 7 values.
struct AmxTile {
  // Rows of q and out follow each other: a fixed stride of the largest head would put them all into one set of the cache.
  alignas(64) uint16_t q[TILE_ROWS * LARGEST_HEAD];
  alignas(64) float out[TILE_ROWS * LARGEST_HEAD];
  alignas(64) float s[TILE_ROWS][SPAN];
  alignas(64) uint16_t p[TILE_ROWS][SPAN];
  alignas(64) uint16_t v[PAGE * LARGEST_HEAD];
  Row rows[TILE_ROWS];

  static bool takes(const AttentionTask& t) { return t.kv_type == Type::bf16 && t.head_size % 32 == 0; }

  static void shape(int rows) {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
      shapes.bytes[i] = i == 6 ? PAGE * 2 : 64;
      shapes.rows[i] = uint8_t(i == 5 ? TILE_ROWS : i == 7 ? PAGE / 2 : rows);
    }
    _tile_loadconfig(&shapes);
  }

  void run(const AttentionTask& t, int count, int64_t first, int64_t last) {
    for (int64_t key = first / SPAN * SPAN; key < last; key += SPAN) {
      const int64_t page = key / PAGE;
      const int pages = int((std::min<int64_t>(last - key, SPAN) + PAGE - 1) / PAGE);
      // Few rows are a decode step, whose pages come from memory.
      if (count < TILE_ROWS) fetch(t, page + PAGES, (std::min(last, key + 2 * SPAN) + PAGE - 1) / PAGE);
      scores(t, page, pages);
      for (int r = 0; r < count; r++) {
        F row[PAGES];
        for (int i = 0; i < PAGES; i++) row[i] = load<F>(s[r] + i * PAGE);
        const float shrink = soften(t, rows[r], key, pages, row, nullptr, p[r]);
        if (shrink != 1)
          for (int64_t d = r * t.head_size; d < (r + 1) * t.head_size; d += LANES)
            store(out + d, load<F>(out + d) * splat(shrink));
      }
      weigh(t, page, pages);
    }
  }

  static void fetch(const AttentionTask& t, int64_t page, int64_t end) {
    for (; page < end; page++)
      for (const void* all : {t.k, t.v}) {
        const uint16_t* from = Pages<uint16_t>().of(all, t, page);
        for (int64_t at = 0; at < PAGE * t.head_size; at += 32) __builtin_prefetch(from + at);
      }
  }

  void scores(const AttentionTask& t, int64_t page, int pages) {
    const uint16_t* k[PAGES];
    for (int i = 0; i < PAGES; i++) k[i] = Pages<uint16_t>().of(t.k, t, page + (i < pages ? i : 0));
    constexpr int64_t STEP = 32 * PAGE;
    memory_is_read();
    clear_sums();
    for (int64_t d = 0; d < t.head_size; d += 32) {
      _tile_loadd(4, q + d, t.head_size * 2);
      _tile_loadd(5, k[0] + d / 32 * STEP, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, k[1] + d / 32 * STEP, 64);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(5, k[2] + d / 32 * STEP, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, k[3] + d / 32 * STEP, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, s[0], SPAN * 4);
    _tile_stored(1, s[0] + PAGE, SPAN * 4);
    _tile_stored(2, s[0] + 2 * PAGE, SPAN * 4);
    _tile_stored(3, s[0] + 3 * PAGE, SPAN * 4);
    memory_is_read();
  }

  void weigh(const AttentionTask& t, int64_t page, int pages) {
    const uint16_t* values[PAGES];
    for (int i = 0; i < pages; i++) values[i] = readable(t, page + i);
    for (int64_t d = 0; d < t.head_size; d += 32) {
      float* to = out + d;
      const int64_t stride = t.head_size * 4;
      memory_is_read();
      _tile_loadd(0, to, stride);
      _tile_loadd(1, to + LANES, stride);
      for (int i = 0; i < pages; i++) {
        _tile_loadd(6, p[0] + i * PAGE, SPAN * 2);
        _tile_loadd(7, values[i] + d * 2, stride);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, values[i] + (d + LANES) * 2, stride);
        _tile_dpbf16ps(1, 6, 7);
      }
      _tile_stored(0, to, stride);
      _tile_stored(1, to + LANES, stride);
      memory_is_read();
    }
  }

  // A page's values; beyond the context it holds whatever it held, and zero weights would not silence a NaN there.
  const uint16_t* readable(const AttentionTask& t, int64_t page) {
    const uint16_t* from = Pages<uint16_t>().of(t.v, t, page);
    const int64_t keys = t.context - page * PAGE;
    if (keys >= PAGE) return from;
    for (int64_t j = 0; j < PAGE; j += 2) {
      const U mask = U{} + (j + 1 < keys ? 0xffffffffu : j < keys ? 0xffffu : 0u);
      for (int64_t at = j * t.head_size; at < (j + 2) * t.head_size; at += 2 * LANES)
        store(v + at, load<U>(from + at) & mask);
    }
    return v;
  }
};

#endif

struct Place {
  int64_t at;  // of the row in the queries and in the output
  Row row;
};

// Rows are (query, head of the group) pairs of one sequence and key/value head.
inline Place place(const AttentionTask& t, int64_t row) {
  const int64_t group = t.heads / t.kv_heads, query = row / group, head = t.kv_head * group + row % group;
  const int64_t position = t.context - t.queries + query, last = t.causal ? position : t.context - 1;
  const int64_t first = t.window > 0 && position >= t.window ? position - t.window + 1 : 0;
  Row seen{first, last + 1};
  if (t.bias) seen.bias = t.bias + (2 * head + 1) * t.reach - position;
  if (t.sinks) seen.sink = t.sinks + head;
  return {((t.first_query + query) * t.heads + head) * t.head_size, seen};
}

inline F query(const AttentionTask& t, int64_t at) {
  return t.q_type == Type::f32 ? load_f32((const float*)t.q + at) : load_f32((const uint16_t*)t.q + at);
}

inline void finish(const AttentionTask& t, int64_t at, const Row& row, const float* out) {
  float total = row.total, shrink = 1;
  if (row.sink) {
    const float sink = *row.sink * LOG2_E, peak = std::fmax(row.peak, sink);
    shrink = exp2(splat(row.peak - peak))[0];
    total = std::fma(total, shrink, exp2(splat(sink - peak))[0]);
  }
  const F inverse = splat(shrink / total);
  for (int64_t d = 0; d < t.head_size; d += LANES) {
    const F y = load<F>(out + d) * inverse;
    if (t.q_type == Type::f32) store_f32((float*)t.out + at + d, y);
    else store_f32((uint16_t*)t.out + at + d, y);
  }
}

// Adds what a row has summed over one stretch to what it has over those before.
inline void add(const AttentionTask& t, const Row& part, const float* from, Row& whole, float* to) {
  if (part.total == 0) return;  // it sees nothing there
  const float peak = std::fmax(whole.peak, part.peak);
  const F old = whole.peak < peak ? exp2(splat(whole.peak - peak)) : splat(1.0f);
  const F fresh = part.peak < peak ? exp2(splat(part.peak - peak)) : splat(1.0f);
  for (int64_t d = 0; d < t.head_size; d += LANES)
    store(to + d, fma(load<F>(from + d), fresh, load<F>(to + d) * old));
  whole.total = std::fma(part.total, fresh[0], whole.total * old[0]);
  whole.peak = peak;
}

// Rows `from` to `from + count`, which `compute(first_key, last_key)` sums over a part of one stretch and `part(r)`
// then holds: over all stretches of the task.
template <int ROWS, class Compute, class Clear, class Part>
inline void by_stretches(const AttentionTask& t, int64_t begin, int64_t from, int count, Whole<ROWS>& whole, Row* rows,
                         Clear clear, Compute compute, Part part) {
  int64_t first = t.context, last = 0;
  for (int r = 0; r < count; r++) {
    whole.rows[r] = place(t, from + r).row;
    first = std::min(first, whole.rows[r].first), last = std::max(last, whole.rows[r].last);
    for (int64_t d = 0; d < t.head_size; d += LANES) store(whole.out[r] + d, F{});
  }
  first = std::max(first, t.first_key), last = std::min(last, t.last_key);
  for (int64_t stretch = first / tw::STRETCH * tw::STRETCH; stretch < last; stretch += tw::STRETCH) {
    for (int r = 0; r < count; r++) {
      rows[r] = Row{whole.rows[r].first, whole.rows[r].last};
      rows[r].bias = whole.rows[r].bias;
    }
    clear();
    compute(std::max(first, stretch), std::min(last, stretch + tw::STRETCH));
    for (int r = 0; r < count; r++) add(t, rows[r], part(r), whole.rows[r], whole.out[r]);
  }
  for (int r = 0; r < count; r++) {
    const Row& row = whole.rows[r];
    if (!t.sums) {
      finish(t, place(t, from + r).at, row, whole.out[r]);
      continue;
    }
    float* sums = t.sums + (from - begin + r) * t.sums_size();
    std::memcpy(sums, whole.out[r], t.head_size * sizeof(float));
    sums[t.head_size] = row.peak, sums[t.head_size + 1] = row.total;
  }
}

#if defined(TW_AMX)
void attention_tiles(const AttentionTask& t, int64_t begin, int64_t end) {
  AmxTile tile;
  Whole<TILE_ROWS> whole;
  const TilesInUse tiles;
  for (int64_t from = begin; from < end; from += TILE_ROWS) {
    const int rows = int(std::min<int64_t>(end - from, TILE_ROWS));
    for (int r = 0; r < rows; r++) {
      const int64_t at = place(t, from + r).at;
      for (int64_t d = 0; d < t.head_size; d += LANES)
        store_f32(tile.q + r * t.head_size + d, query(t, at + d));
    }
    AmxTile::shape(rows);
    by_stretches<TILE_ROWS>(
        t, begin, from, rows, whole, tile.rows, [&] { std::memset(tile.out, 0, rows * t.head_size * sizeof(float)); },
        [&](int64_t first, int64_t last) { tile.run(t, rows, first, last); },
        [&](int r) { return tile.out + r * t.head_size; });
  }
}
#endif

// `begin` and `end` count rows.
void attention(const AttentionTask& t, int64_t begin, int64_t end) {
#if defined(TW_AMX)
  if (AmxTile::takes(t)) return attention_tiles(t, begin, end);
#endif
  Tile tile;
  Whole<ROWS> whole;
  for (int64_t from = begin; from < end; from += ROWS) {
    const int rows = int(std::min<int64_t>(end - from, ROWS));
    tile.cold = from == begin && end - begin <= 4 * ROWS;
    for (int r = 0; r < rows; r++) {
      const int64_t at = place(t, from + r).at;
      for (int64_t d = 0; d < t.head_size; d += LANES) {
        const F x = query(t, at + d);
        store(tile.q[r] + d, x);
        store_f32(tile.q_bf16[r] + d, x);
      }
    }
    const auto clear = [&] {
      for (int r = 0; r < rows; r++) std::memset(tile.out[r], 0, t.head_size * sizeof(float));
    };
    const auto compute = [&](int64_t first, int64_t last) {
      switch (rows) {
        case 1: return run_typed<1>(t, tile, first, last);
        case 2: return run_typed<2>(t, tile, first, last);
        case 3: return run_typed<3>(t, tile, first, last);
        default: return run_typed<4>(t, tile, first, last);
      }
    };
    by_stretches<ROWS>(t, begin, from, rows, whole, tile.rows, clear, compute, [&](int r) { return tile.out[r]; });
  }
}

// Rows whose stretches several calls of `attention` have summed, one after another in `t.sums`.
void add_stretches(const AttentionTask& t, int64_t begin, int64_t end, int64_t stretches) {
  alignas(64) float out[LARGEST_HEAD];
  for (int64_t row = begin; row < end; row++) {
    const Place here = place(t, row);
    Row whole = here.row;
    std::memset(out, 0, t.head_size * sizeof(float));
    for (int64_t i = 0; i < stretches; i++) {
      const float* sums = t.sums + (i * (end - begin) + row - begin) * t.sums_size();
      add(t, Row{0, 0, sums[t.head_size], sums[t.head_size + 1]}, sums, whole, out);
    }
    finish(t, here.at, whole, out);
  }
}

}  // namespace TW_ISA
