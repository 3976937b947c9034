// Attention without a cache: every query against every key of a head, the scores of a few queries at a time.
//
// What is added to the scores is made for one query when its turn comes: a mask's row, or, where tokens are places of a
// grid, the sums of a query's products with row and column vectors (Li et al., "MViTv2", 2021), so that a bias of
// (queries, keys) never exists.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "encoder.h"
#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::DenseAttentionTask;

// Keys and values of one head in the order in which the products read them, and the scores of some queries.
// bfloat16: keys are (blocks of 16, head_size / 2, 16, 2) and values (pairs of keys, head_size, 2); float32: keys are
// (blocks of 16, head_size, 16) and values (keys, head_size). Both are padded with zeros to `width` keys.
template <class T>
class Head {
 public:
  Head(const DenseAttentionTask& t, int64_t batch, int64_t head)
      : t(t),
        width((t.keys + WHOLE - 1) / WHOLE * WHOLE),
        keys(allocate(width * t.head_size * sizeof(T))),
        values(allocate(width * t.head_size * sizeof(T))),
        scores(allocate(MOST_ROWS * width * 4)),
        weights(allocate(MOST_ROWS * width * sizeof(T))),
        // A row of places that is no multiple of sixteen runs into the next one's, the last into what is behind.
        added(allocate((width + LANES) * 4)),
        near(allocate((up(t.height) + up(t.width)) * 4)),
        q((const T*)t.q.data + batch * t.q.batch + head * t.q.head),
        out((T*)t.out + (batch * t.queries * t.heads + head) * t.head_size),
        mask_at(batch * t.mask_batch + head * t.mask_head) {
    pack_keys((const T*)t.k.data + batch * t.k.batch + head * t.k.head);
    pack_values((const T*)t.v.data + batch * t.v.batch + head * t.v.head);
    if (t.mask && !t.mask_query) read_mask(0);
  }

  void run(int64_t begin, int64_t end) const {
#if defined(TW_AMX)
    if (PAIRED) return run_tiles(begin, end);
#endif
    const int64_t tiles = (end - begin + ROWS - 1) / ROWS;
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t from = begin + (end - begin) * i / tiles;
      dispatch<ROWS>(from, begin + (end - begin) * (i + 1) / tiles - from);
    }
  }

 private:
  static constexpr bool PAIRED = sizeof(T) == 2;
  static constexpr int ROWS = 6, MOST_ROWS = 16, BLOCKS_AT_ONCE = 4, WHOLE = 32;

  static int64_t up(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

  void pack_keys(const T* from) const {
    typedef std::conditional_t<PAIRED, uint32_t, float> Step;
    const int64_t steps = t.head_size * sizeof(T) / 4;
    Step* to = (Step*)keys.get();
    for (int64_t key = 0; key < width; key++) {
      Step* column = to + key / LANES * steps * LANES + key % LANES;
      const char* row = (const char*)(from + key * t.k.token);
      for (int64_t d = 0; d < steps; d++) column[d * LANES] = key < t.keys ? read<Step>(row + 4 * d) : Step(0);
    }
  }

  void pack_values(const T* from) const {
    if constexpr (!PAIRED) {
      float* to = (float*)values.get();
      for (int64_t key = 0; key < t.keys; key++)
        std::memcpy(to + key * t.head_size, from + key * t.v.token, t.head_size * sizeof(float));
    } else {
      uint32_t* to = (uint32_t*)values.get();
      for (int64_t key = 0; key < width; key += 2, to += t.head_size) {
        const uint16_t* row = from + key * t.v.token;
        if (key + 1 < t.keys)
          for (int64_t d = 0; d < t.head_size; d++) to[d] = row[d] | uint32_t(row[t.v.token + d]) << 16;
        else
          for (int64_t d = 0; d < t.head_size; d++) to[d] = key < t.keys ? row[d] : 0;
      }
    }
  }

  // What is added to a query's scores, in powers of two: of a mask …
  void read_mask(int64_t query) const {
    float* to = (float*)added.get();
    const int64_t at = mask_at + query * t.mask_query;
    for (int64_t key = 0; key < t.keys; key++) {
      const int64_t i = at + key * t.mask_key;
      to[key] = t.mask_is_bool ? ((const bool*)t.mask)[i] ? 0 : NOTHING : ((const float*)t.mask)[i] * LOG2_E;
    }
  }

  // … and of places.
  void read_places(int64_t query) const {
    float *rows = (float*)near.get(), *columns = rows + up(t.height), *to = (float*)added.get();
    along(query, t.by_row, t.height, query / t.width, rows);
    along(query, t.by_column, t.width, query % t.width, columns);
    for (int64_t y = 0; y < t.height; y++, to += t.width) {
      const F row = splat(rows[y]);
      for (int64_t x = 0; x < t.width; x += LANES) store(to + x, row + load<F>(columns + x));
    }
  }

  // A query's products with the vectors of all places along one side of the grid, seen from its own place there.
  void along(int64_t query, const float* table, int64_t extent, int64_t place, float* to) const {
    const int64_t stride = DenseAttentionTask::table_width(extent);
    const T* x = q + query * t.q.token;
    for (int64_t at = 0; at < extent; at += LANES) {
      const float* from = table + extent - 1 - place + at;
      F sum = F{};
      for (int64_t d = 0; d < t.head_size; d++) sum = fma(splat(wide(x[d])), load<F>(from + d * stride), sum);
      store(to + at, sum * splat(LOG2_E));
    }
  }

  static float wide(T x) {
    if constexpr (PAIRED) return widen(x);
    else return x;
  }

  template <int R>
  void dispatch(int64_t query, int64_t rows) const {
    if constexpr (R > 1) {
      if (rows < R) return dispatch<R - 1>(query, rows);
    }
    int64_t block = 0;
    const int64_t blocks = width / LANES;
    for (; block + BLOCKS_AT_ONCE <= blocks; block += BLOCKS_AT_ONCE) score<R, BLOCKS_AT_ONCE>(query, block);
    if (block < blocks) score<R, WHOLE / LANES>(query, block);
    float inverse[R];
    for (int r = 0; r < R; r++) inverse[r] = soften(query + r, r);
    int64_t d = 0;
    for (; d + 4 * LANES <= t.head_size; d += 4 * LANES) weigh<R, 4>(query, d, inverse);
    for (; d + 2 * LANES <= t.head_size; d += 2 * LANES) weigh<R, 2>(query, d, inverse);
    for (; d < t.head_size; d += LANES) weigh<R, 1>(query, d, inverse);
  }

  // sum[r][b] + w[b] · what `rows` holds at one place of each row: two products of bfloat16, or one of float32.
  template <int R, int B>
  static void multiply(F (&sum)[R][B], const char* w, int64_t next, const T* rows, int64_t stride) {
    U block[B];
    for (int b = 0; b < B; b++) block[b] = load<U>(w + b * next);
    for (int r = 0; r < R; r++) {
      if constexpr (PAIRED) {
        const uint32_t two = read<uint32_t>(rows + r * stride);
        for (int b = 0; b < B; b++) sum[r][b] = dot2(sum[r][b], block[b], two);
      } else {
        const F one = splat(rows[r * stride]);
        for (int b = 0; b < B; b++) sum[r][b] = fma(as_float(block[b]), one, sum[r][b]);
      }
    }
  }

  template <int R, int B>
  void score(int64_t query, int64_t block) const {
    F sum[R][B] = {};
    const int64_t bytes = t.head_size * sizeof(T) * LANES;
    const char* from = (const char*)keys.get() + block * bytes;
    const T* rows = q + query * t.q.token;
    for (int64_t d = 0; d < t.head_size; d += 4 / sizeof(T), from += 64)
      multiply(sum, from, bytes, rows + d, t.q.token);
    float* to = (float*)scores.get() + block * LANES;
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++) store(to + r * width + b * LANES, sum[r][b]);
  }

  // Turns a row of scores into weights up to their sum, whose inverse it returns: zero where nothing is seen.
  float soften(int64_t query, int r) const {
    float* s = (float*)scores.get() + r * width;
    T* p = (T*)weights.get() + r * width;
    if (t.mask && t.mask_query) read_mask(query);
    if (t.by_row) read_places(query);
    const float* more = (const float*)added.get();
    const F scale = splat(t.scale * LOG2_E), nothing = splat(NOTHING);
    F peak = nothing;
    for (int64_t key = 0; key < width; key += LANES) {
      F x = load<F>(s + key) * scale;
      if (t.mask || t.by_row) x = max(nothing, x + load<F>(more + key));
      if (key + LANES > t.keys) {
        const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        x = select(lane + int32_t(key) < int32_t(t.keys), x, nothing);
      }
      store(s + key, x);
      peak = max(peak, x);
    }
    const float top = largest(peak);
    F total = F{};
    for (int64_t key = 0; key < width; key += LANES) {
      const F x = load<F>(s + key);
      const F weight = select(x <= nothing, F{}, exp2(max(splat(-126.0f), x - top)));
      total = total + weight;
      store_f32(p + key, weight);
    }
    const float all = sum(total);
    return all == 0 ? 0 : 1 / all;
  }

  template <int R, int B>
  void weigh(int64_t query, int64_t d, const float* inverse) const {
    constexpr int64_t STEP = 4 / sizeof(T);
    F acc[R][B] = {};
    const char* from = (const char*)((const float*)values.get() + d);
    const T* p = (const T*)weights.get();
    for (int64_t key = 0; key < t.keys; key += STEP, from += t.head_size * 4)
      multiply(acc, from, 64, p + key, width);
    for (int r = 0; r < R; r++) {
      T* to = out + (query + r) * t.heads * t.head_size + d;
      for (int b = 0; b < B; b++) store_f32(to + b * LANES, acc[r][b] * splat(inverse[r]));
    }
  }

#if defined(TW_AMX)

  // Registers 0 and 1 hold sums, 4 queries or weights, 5 keys or values; 6 and 7 the last sixteen features of queries
  // and keys, where a head is no multiple of 32.
  void run_tiles(int64_t begin, int64_t end) const {
    const TilesInUse tiles;
    for (int64_t query = begin; query < end; query += TILE_ROWS) {
      const int64_t rows = std::min<int64_t>(TILE_ROWS, end - query);
      TileShapes shapes;
      for (int i = 0; i < 6; i++) shapes.bytes[i] = 64, shapes.rows[i] = uint8_t(i == 5 ? TILE_ROWS : rows);
      shapes.bytes[6] = 32, shapes.rows[6] = uint8_t(rows);
      shapes.bytes[7] = 64, shapes.rows[7] = TILE_ROWS / 2;
      _tile_loadconfig(&shapes);
      score_tiles(query);
      float inverse[TILE_ROWS];
      for (int64_t r = 0; r < rows; r++) inverse[r] = soften(query + r, int(r));
      for (int64_t d = 0; d < t.head_size; d += 32) weigh_tiles(query, rows, d, inverse);
    }
  }

  void score_tiles(int64_t query) const {
    const int64_t block = t.head_size * LANES * 2, stride = width * 4, whole = t.head_size / 32 * 32;
    const char* from = (const char*)keys.get();
    float* to = (float*)scores.get();
    memory_is_read();
    for (int64_t key = 0; key < width; key += WHOLE, from += 2 * block, to += WHOLE) {
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t d = 0; d < whole; d += 32) {
        _tile_loadd(4, q + query * t.q.token + d, t.q.token * 2);
        _tile_loadd(5, from + d * 32, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, from + block + d * 32, 64);
        _tile_dpbf16ps(1, 4, 5);
      }
      if (whole < t.head_size) {
        _tile_loadd(6, q + query * t.q.token + whole, t.q.token * 2);
        _tile_loadd(7, from + whole * 32, 64);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, from + block + whole * 32, 64);
        _tile_dpbf16ps(1, 6, 7);
      }
      _tile_stored(0, to, stride);
      _tile_stored(1, to + LANES, stride);
    }
    memory_is_read();
  }

  void weigh_tiles(int64_t query, int64_t rows, int64_t d, const float* inverse) const {
    alignas(64) float sums[TILE_ROWS][2 * LANES];
    const char* from = (const char*)((const float*)values.get() + d);
    const int64_t stride = t.head_size * 4;
    const T* p = (const T*)weights.get();
    const int blocks = d + LANES < t.head_size ? 2 : 1;
    memory_is_read();
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t key = 0; key < width; key += WHOLE, from += WHOLE / 2 * stride) {
      _tile_loadd(4, p + key, width * 2);
      _tile_loadd(5, from, stride);
      _tile_dpbf16ps(0, 4, 5);
      if (blocks == 1) continue;
      _tile_loadd(5, from + 64, stride);
      _tile_dpbf16ps(1, 4, 5);
    }
    _tile_stored(0, sums, sizeof sums[0]);
    _tile_stored(1, sums[0] + LANES, sizeof sums[0]);
    memory_is_read();
    for (int64_t r = 0; r < rows; r++) {
      T* to = out + (query + r) * t.heads * t.head_size + d;
      for (int b = 0; b < blocks; b++) store_f32(to + b * LANES, load<F>(sums[r] + b * LANES) * splat(inverse[r]));
    }
  }

#endif

  const DenseAttentionTask& t;
  const int64_t width;  // keys, in whole tiles
  const Bytes keys, values, scores, weights, added, near;
  const T* q;
  T* out;
  const int64_t mask_at;
};

void dense_attention(const DenseAttentionTask& t, int64_t batch, int64_t head, int64_t begin, int64_t end) {
  if (t.type == tw::Type::f32) Head<float>(t, batch, head).run(begin, end);
  else Head<uint16_t>(t, batch, head).run(begin, end);
}

}  // namespace TW_ISA
