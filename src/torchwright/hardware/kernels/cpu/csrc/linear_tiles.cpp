// Linear layers over 4-bit integers in groups, which are the left operand of AMX tiles (codes_tiles.h). Empty where the
// target has no tiles.
//
// Activations are the right operand: pairs of inputs by tokens. Products and the order of their sums are those of a
// bfloat16 panel (linear.cpp), and so are the bits.
#include "codes_tiles.h"

#if defined(TW_AMX)
namespace TW_ISA {

// Sixteen rows of sixteen words become columns.
inline void turn(__m512i (&x)[16]) {
  __m512i y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    y[i] = i & 1 ? _mm512_unpackhi_epi32(x[i - 1], x[i]) : _mm512_unpacklo_epi32(x[i], x[i + 1]);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    const int row = i & ~3, half = i >> 1 & 1;
    x[i] = i & 1 ? _mm512_unpackhi_epi64(y[row + half], y[row + half + 2])
                 : _mm512_unpacklo_epi64(y[row + half], y[row + half + 2]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    const int row = i & 8, column = i & 3;
    y[i] = i & 4 ? _mm512_shuffle_i32x4(x[row + column], x[row + column + 4], 0xdd)
                 : _mm512_shuffle_i32x4(x[row + column], x[row + column + 4], 0x88);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    x[i] = i & 8 ? _mm512_shuffle_i32x4(y[i & 7], y[(i & 7) + 8], 0xdd)
                 : _mm512_shuffle_i32x4(y[i & 7], y[(i & 7) + 8], 0x88);
}

// Some steps of at most sixteen rows in bfloat16 as the right operand: pair after pair of inputs, `columns` tokens each.
// Columns beyond the rows are zeros.
void turn_rows(const uint16_t* rows, int64_t stride, int64_t count, int64_t columns, int64_t steps, uint16_t* to) {
  const __mmask16 some = __mmask16((1u << columns) - 1);
  for (int64_t step = 0; step < steps; step++, rows += TILE_INPUTS) {
    __m512i x[16];
    for (int64_t r = 0; r < 16; r++) x[r] = r < count ? _mm512_loadu_si512(rows + r * stride) : __m512i{};
    turn(x);
    for (int pair = 0; pair < 16; pair++, to += 2 * columns) _mm512_mask_storeu_epi32(to, some, x[pair]);
  }
}

// Tokens in tiles of `columns`; a step's pairs of inputs lie `stride` bytes apart.
struct TurnedRows {
  const char* data;
  int64_t columns, stride, steps;
  explicit TurnedRows(const LinearTask& t)
      : data((const char*)t.rows), columns(t.columns), stride(4 * t.columns), steps(t.depth / TILE_INPUTS) {}
  int64_t step_bytes() const { return TILE_ROWS * stride; }
  const char* at(int64_t tile, int64_t step) const { return data + (tile * steps + step) * step_bytes(); }
};

// Sums are tiles of 16 features by tokens, registers 0 to 3; 4 and 5 hold weights, 6 and 7 tokens.
inline void shape_turned(int64_t columns) {
  TileShapes shapes;
  for (int i = 0; i < 8; i++) {
    shapes.rows[i] = TILE_ROWS;
    shapes.bytes[i] = uint16_t(i == 4 || i == 5 ? 64 : 4 * columns);
  }
  _tile_loadconfig(&shapes);
}

// Four blocks of features by one tile of tokens.
inline void add_four(const char* weights, const TurnedRows& rows, int64_t tile, int64_t begin, int64_t steps) {
  const char* tokens = rows.at(tile, begin);
  for (int64_t step = 0; step < steps; step++, weights += 4 * TILE, tokens += rows.step_bytes()) {
    _tile_loadd(6, tokens, rows.stride);
    _tile_loadd(4, weights, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, weights + TILE, 64);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, weights + 2 * TILE, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, weights + 3 * TILE, 64);
    _tile_dpbf16ps(3, 5, 6);
  }
}

// Two blocks of features, whose tiles lie `apart` bytes from one step to the next, by two tiles of tokens.
inline void add_two_by_two(const char* weights, int64_t apart, const TurnedRows& rows, int64_t tile, int64_t begin,
                           int64_t steps) {
  const char *low = rows.at(tile, begin), *high = rows.at(tile + 1, begin);
  for (int64_t step = 0; step < steps; step++, weights += apart, low += TILE, high += TILE) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(6, low, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, high, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, weights + TILE, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

inline void load_sums(const float* a, const float* b, const float* c, const float* d, int64_t stride) {
  _tile_loadd(0, a, stride);
  _tile_loadd(1, b, stride);
  _tile_loadd(2, c, stride);
  _tile_loadd(3, d, stride);
}

inline void store_sums(float* a, float* b, float* c, float* d, int64_t stride) {
  _tile_stored(0, a, stride);
  _tile_stored(1, b, stride);
  _tile_stored(2, c, stride);
  _tile_stored(3, d, stride);
}

// Sums of one tile as the output's numbers.
inline void finish_tile(const LinearTask& t, const float* sums, int64_t token, int64_t feature) {
  if (feature >= t.features) return;
  if (t.columns == 1) return put_token(t, load<F>(sums), token, feature);
  __m512i x[16];
  for (int i = 0; i < 16; i++) x[i] = _mm512_load_si512(sums + 16 * i);
  turn(x);
  const int64_t count = std::min<int64_t>(TILE_ROWS, t.row_end - token);
  for (int64_t r = 0; r < count; r++) put_token(t, (F)x[r], token + r, feature);
}

// Some panels against all rows of a task.
class TiledIntegers {
 public:
  explicit TiledIntegers(const LinearTask& t)
      : t(t),
        groups(t),
        rows(t),
        first(t.row_begin / TILE_ROWS),
        tiles((t.row_end - t.row_begin + TILE_ROWS - 1) / TILE_ROWS) {}

  void run() const {
    const TilesInUse in_use;
    shape_turned(t.columns);
    if (tiles > FEW) return many();
    for (int64_t panel = t.panel_begin; panel < t.panel_end; panel++)
      for (int64_t tile = 0; tile < tiles; tile += 2) {
        if (tile + 1 == tiles) {
          pass<1>(panel, 0, tile);
        } else {
          pass<2>(panel, 0, tile);
          pass<2>(panel, BLOCKS / 2, tile);
        }
      }
  }

 private:
  // Tiles of tokens up to which widening a panel again for each two of them, next to their products, costs no more than
  // sums that leave the registers: level at eight, and a tenth slower at 32 of a deep layer.
  static constexpr int64_t FEW = 8;
  static constexpr int64_t SPAN = 32, TOGETHER = 4, CHUNK = 8, UNIT = 2, TILE_FLOATS = TILE / 4;

  // A panel by a tile of tokens, or half a panel from `block` on by two: all sums stay in registers.
  template <int TILES>
  void pass(int64_t panel, int64_t block, int64_t tile) const {
    const int64_t stride = t.columns == 1 ? 4 : 64;  // one token's sums are the features' own
    alignas(64) float sums[4 * TILE_FLOATS] = {};
    clear_sums();
    stream<TILES>(panel, block, tile);
    store_sums(sums, sums + TILE_FLOATS, sums + 2 * TILE_FLOATS, sums + 3 * TILE_FLOATS, stride);
    memory_is_read();
    for (int64_t i = 0; i < 4; i++)
      finish_tile(t, sums + i * TILE_FLOATS, t.row_begin + (tile + i % TILES) * TILE_ROWS,
                  panel * PANEL + (block + i / TILES) * TILE_ROWS);
  }

  // A unit of steps is multiplied while the next is widened: tiles are read long after they were written, when they
  // have left the store buffer.
  template <int TILES>
  void stream(int64_t panel, int64_t block, int64_t tile) const {
    constexpr int64_t COUNT = 4 / TILES, MOST = 4, APART = COUNT * TILE;
    alignas(64) char wide[2][MOST * APART];
    const int64_t unit = std::max(groups.steps, UNIT);
    const auto multiply = [&](const char* from, int64_t step) {
      if constexpr (TILES == 1) add_four(from, rows, first + tile, step, 1);
      else add_two_by_two(from, APART, rows, first + tile, step, 1);
    };
    const char *group = groups.at(panel, 0), *const end = group + groups.count * groups.bytes;
    char *to = wide[0], *from = wide[1];
    alignas(64) float rooms[2][2 * PANEL];
    const float* heads = groups.heads(group, rooms[0]);
    int64_t room = 0;
    for (int64_t begin = 0; begin < rows.steps; begin += unit, std::swap(from, to)) {
      int64_t done = begin ? 0 : unit, widened = 0;
      for (int64_t step = 0; step < unit; step += groups.steps) {
        const char* following = group + groups.bytes;
        // Made while this group is widened, because what was just written is slow to read.
        const float* next = following < end ? groups.heads(following, rooms[room = 1 - room]) : nullptr;
        for (int64_t b = 0; b < COUNT; b++) {
          groups.widen(group, heads, block + b, 0, groups.steps, to + step * APART + b * TILE, APART);
          memory_is_read();
          for (widened += groups.steps; done < unit && (done + 1) * COUNT <= widened; done++)
            multiply(from + done * APART, begin - unit + done);
        }
        group = following, heads = next;
      }
    }
    for (int64_t step = 0; step < unit; step++) multiply(from + step * APART, rows.steps - unit + step);
  }

  // Many tiles of tokens meet SPAN steps of some panels before the next (see Tiled).
  void many() const {
    const int64_t span = std::min(SPAN, rows.steps), together = span == rows.steps ? 1 : TOGETHER;
    const Bytes wide = allocate(span * BLOCKS * TILE), memory = allocate(together * tiles * BLOCKS * TILE);
    for (int64_t panel = t.panel_begin; panel < t.panel_end; panel += together)
      for (int64_t begin = 0; begin < rows.steps; begin += span)
        for (int64_t i = 0; i < std::min(together, t.panel_end - panel); i++)
          add_span(panel + i, begin, std::min(begin + span, rows.steps), (char*)wide.get(),
                   (float*)memory.get() + i * tiles * BLOCKS * TILE_FLOATS);
  }

  void add_span(int64_t panel, int64_t begin, int64_t end, char* wide, float* sums) const {
    for (int64_t step = begin, stop; step < end; step = stop) {
      const int64_t number = step / groups.steps, inside = step - number * groups.steps;
      const char* group = groups.at(panel, number);
      alignas(64) float room[2 * PANEL];
      const float* heads = groups.heads(group, room);
      stop = std::min(end, (number + 1) * groups.steps);
      for (int64_t b = 0; b < BLOCKS; b++)
        groups.widen(group, heads, b, inside, stop - step, wide + ((step - begin) * BLOCKS + b) * TILE, BLOCKS * TILE);
    }
    memory_is_read();
    for (int64_t step = begin; step < end; step += CHUNK)
      add_chunk(wide + (step - begin) * BLOCKS * TILE, step, std::min(CHUNK, end - step), sums);
    memory_is_read();
    if (end < rows.steps) return;
    for (int64_t tile = 0; tile < tiles; tile++)
      for (int64_t b = 0; b < BLOCKS; b++, sums += TILE_FLOATS)
        finish_tile(t, sums, t.row_begin + tile * TILE_ROWS, panel * PANEL + b * TILE_ROWS);
  }

  // Half a panel by CHUNK steps is 16 KB, which stays in the first level of cache while all tokens pass.
  void add_chunk(const char* wide, int64_t step, int64_t steps, float* sums) const {
    for (int64_t block = 0; block < BLOCKS; block += 2)
      for (int64_t tile = 0; tile + 1 < tiles; tile += 2) {
        float* low = sums + (tile * BLOCKS + block) * TILE_FLOATS;
        float *high = low + BLOCKS * TILE_FLOATS, *next = low + TILE_FLOATS, *last = high + TILE_FLOATS;
        if (step) load_sums(low, high, next, last, 64);
        else clear_sums();
        add_two_by_two(wide + block * TILE, BLOCKS * TILE, rows, first + tile, step, steps);
        store_sums(low, high, next, last, 64);
      }
    if (tiles % 2 == 0) return;
    float* at = sums + (tiles - 1) * BLOCKS * TILE_FLOATS;
    if (step) load_sums(at, at + TILE_FLOATS, at + 2 * TILE_FLOATS, at + 3 * TILE_FLOATS, 64);
    else clear_sums();
    add_four(wide, rows, first + tiles - 1, step, steps);
    store_sums(at, at + TILE_FLOATS, at + 2 * TILE_FLOATS, at + 3 * TILE_FLOATS, 64);
  }

  const LinearTask& t;
  const TiledGroups groups;
  const TurnedRows rows;
  const int64_t first, tiles;  // of tokens
};

void linear_tiles(const LinearTask& t) { TiledIntegers(t).run(); }

}  // namespace TW_ISA
#endif
