// AMX tiles: up to 32 rows of activations times a panel of packed weights. Empty where the target has none.
#pragma once

#include <algorithm>

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define TW_AMX 1
#endif

#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::TILE_ROWS;

#if defined(TW_AMX)

constexpr int TILED = 2;  // rows from which tiles are faster than vectors on 8-bit weights

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Registers 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights. With at most 16 rows all four sums are theirs.
inline void shape_tiles(int64_t rows) {
  TileShapes shapes;
  const int64_t low = std::min<int64_t>(rows, TILE_ROWS), high = rows > TILE_ROWS ? rows - TILE_ROWS : low;
  for (int i = 0; i < 8; i++) {
    shapes.bytes[i] = 64;
    shapes.rows[i] = uint8_t(i >= 6 ? TILE_ROWS : i == 2 || i == 3 || i == 5 ? high : low);
  }
  _tile_loadconfig(&shapes);
}

// The tile registers belong to a thread; whoever leaves gives them back, or the kernel saves 8 KB at every switch.
struct TilesInUse {
  ~TilesInUse() { _tile_release(); }
};

// Register numbers are part of the instruction, and GCC's intrinsics take them as text: no template can name them.
#define TW_TILE_DOT(SUM, ROWS, WEIGHTS)    \
  if constexpr (INTEGERS)                  \
    _tile_dpbsud(SUM, ROWS, WEIGHTS);      \
  else                                     \
    _tile_dpbf16ps(SUM, ROWS, WEIGHTS)

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// GCC's intrinsics do not tell it that a tile load reads memory.
inline void memory_is_read() { asm volatile("" ::: "memory"); }

// Rows cut into equal blocks of at most 32, a multiple of `unit`, so that one shape of tiles serves all; the last may overlap the one before.
struct RowBlocks {
  int64_t all, count, rows;
  RowBlocks(int64_t all, int64_t unit)
      : all(all),
        count((all + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS)),
        rows((all + count * unit - 1) / (count * unit) * unit) {}
  // One tile of rows, to which the weights stream from memory.
  bool few() const { return all <= TILE_ROWS; }
  int64_t start(int64_t block) const { return block + 1 < count ? block * rows : all - rows; }
};

constexpr int64_t LINE = tw::PANEL * 4, STEP = TILE_ROWS * LINE;  // bytes of a panel: one row, one tile step

// At most 16 rows by the four blocks of a panel, added to what `sums` holds (or to zero, at `first`); `streams` says
// that the panel comes from memory.
template <bool INTEGERS, class Number>
inline void multiply_few(const char* a, int64_t stride, const char* panel, int64_t steps, bool first, bool streams,
                         Number* sums) {
  if (first) {
    clear_sums();
  } else {
    _tile_loadd(0, sums, LINE);
    _tile_loadd(1, sums + 16, LINE);
    _tile_loadd(2, sums + 32, LINE);
    _tile_loadd(3, sums + 48, LINE);
  }
  for (const char* w = panel; w < panel + steps * STEP; w += STEP, a += 64) {
    // A quarter of the next step at a time: all of its lines at once would keep the loads waiting for their turn.
    const auto ask = [&](int64_t quarter) __attribute__((always_inline)) {
      if (streams)
#pragma GCC unroll 16
        for (int64_t line = 0; line < STEP / 4; line += 64) __builtin_prefetch(w + STEP + quarter * STEP / 4 + line);
    };
    ask(0);
    _tile_loadd(4, a, stride);
    _tile_loadd(6, w, LINE);
    TW_TILE_DOT(0, 4, 6);
    ask(1);
    _tile_loadd(7, w + 64, LINE);
    TW_TILE_DOT(1, 4, 7);
    ask(2);
    _tile_loadd(6, w + 128, LINE);
    TW_TILE_DOT(2, 4, 6);
    ask(3);
    _tile_loadd(7, w + 192, LINE);
    TW_TILE_DOT(3, 4, 7);
  }
  _tile_stored(0, sums, LINE);
  _tile_stored(1, sums + 16, LINE);
  _tile_stored(2, sums + 32, LINE);
  _tile_stored(3, sums + 48, LINE);
}

// Two tiles of rows by two blocks of a panel, added to what `sums` holds (or to zero, at `first`). Each step asks for
// `count` lines of what is read next.
template <bool INTEGERS, class Number>
inline void multiply_block(const char* low, const char* high, int64_t stride, const char* w, int64_t steps, bool first,
                           Number* sums, Number* high_sums, const char* next, int64_t count) {
  if (first) {
    clear_sums();
  } else {
    _tile_loadd(0, sums, LINE);
    _tile_loadd(1, sums + 16, LINE);
    _tile_loadd(2, high_sums, LINE);
    _tile_loadd(3, high_sums + 16, LINE);
  }
  for (int64_t s = 0; s < steps; s++, w += STEP, low += 64, high += 64) {
    for (int64_t i = 0; i < count; i++, next += 64) __builtin_prefetch(next, 0, 2);
    _tile_loadd(4, low, stride);
    _tile_loadd(6, w, LINE);
    _tile_loadd(7, w + 64, LINE);
    TW_TILE_DOT(0, 4, 6);
    _tile_loadd(5, high, stride);
    TW_TILE_DOT(1, 4, 7);
    TW_TILE_DOT(2, 5, 6);
    TW_TILE_DOT(3, 5, 7);
  }
  _tile_stored(0, sums, LINE);
  _tile_stored(1, sums + 16, LINE);
  _tile_stored(2, high_sums, LINE);
  _tile_stored(3, high_sums + 16, LINE);
}

// sums[b · 32 + r][f] += Σ a[r] · w[f] over `steps` times 64 bytes of the rows of each block b, `stride` bytes apart;
// `first` says that there is nothing to add to. `next` is what will be read after the panel, or null.
//
// Half a panel by CHUNK steps is 16 KB, which stays in the first level of cache while all rows pass.
template <bool INTEGERS, class Number>
inline void multiply_tiles(const char* a, int64_t stride, const RowBlocks& blocks, const char* panel, int64_t steps,
                           bool first, const char* next, Number* sums) {
  constexpr int64_t CHUNK = 8;
  memory_is_read();
  if (blocks.few()) {
    multiply_few<INTEGERS>(a, stride, panel, steps, first, next, sums);
  } else {
    const int64_t low_rows = std::min<int64_t>(blocks.rows, TILE_ROWS), passes = 2 * blocks.count;
    const int64_t count = next ? (STEP / 64 + passes - 1) / passes : 0;
    for (int64_t begin = 0; begin < steps; begin += CHUNK) {
      const int64_t chunk = std::min(steps - begin, CHUNK);
      const char *w = panel + begin * STEP, *ahead = begin + chunk < steps ? w + chunk * STEP : next;
      for (int64_t pass = 0; pass < passes; pass++, ahead += chunk * count * 64) {
        const int64_t block = pass % blocks.count, half = pass / blocks.count;
        const char* low = a + blocks.start(block) * stride + begin * 64;
        Number* at = sums + block * 2 * TILE_ROWS * tw::PANEL + half * 32;
        multiply_block<INTEGERS>(low, low + low_rows * stride, stride, w + half * 128, chunk, first && !begin, at,
                                 at + low_rows * tw::PANEL, ahead, count);
      }
    }
  }
  memory_is_read();
}

#undef TW_TILE_DOT

#endif

}  // namespace TW_ISA
