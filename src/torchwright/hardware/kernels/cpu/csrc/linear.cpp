// Linear layers over packed weights: 8-bit and 4-bit integers on integer activations, and bfloat16.
//
// A panel holds PANEL output features as blocks of 16 (one lane each); its bytes are read in one direction, so that a
// single row streams it from memory, and a tile of rows shares every vector it loads. The same bytes are AMX tiles
// (amx.h). A row's result is the same to the bit whatever tile it fell into: integers are exact, and the float
// operations on it are the same in all.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "amx.h"
#include "codes.h"
#include "i8mm.h"
#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::DEPTH;
using tw::LinearTask;
using tw::PANEL;
using tw::SUMMED;
using tw::Type;

#if defined(__AVX512F__)
// 6 rows by a panel's 4 blocks leave room for the weights in 32 registers, and a panel that comes from memory is read in
// one go. 4-bit sums take twice the registers.
constexpr int TALL = 6, GROUPED = 4, TALL_BLOCKS = BLOCKS, PAIR_BLOCKS = BLOCKS;
#elif defined(TW_FOUR)
// Four rows by one block take half of 32 registers; 4-bit sums, of which there are two a row, all of them.
constexpr int TALL = 4, GROUPED = 2, TALL_BLOCKS = 1, PAIR_BLOCKS = 1;
#else
// Two rows by one block would wait for the latency of each other's sums.
constexpr int TALL = 4, GROUPED = 4, TALL_BLOCKS = 1, PAIR_BLOCKS = 2;
#endif
// Rows from which a 4-bit panel is widened to 8 bits first: the cost is shared by all rows, and AMX can read it.
#if defined(TW_AMX)
constexpr int WIDENED = 9;
#elif defined(__AVX512F__)
constexpr int WIDENED = 24;
#elif defined(TW_MATRICES)
constexpr int WIDENED = 24;  // as with AVX-512: not measured on Arm
#else
constexpr int WIDENED = 1 << 30;  // without byte dot products of full range the widened panel is slower
#endif

inline U nibbles(U x, int which) { return (which ? x >> 4 : x) & 0x0f0f0f0fu; }

// Activations are rows of int8: one a token, or two (high and low digit) where they have 16 bits.
inline int64_t sums_of(const LinearTask& t) { return t.depth / SUMMED + 1; }

// Few rows read a panel from memory, and their first blocks ask for the lines of the others as well. The processor's own
// prefetching does not keep up (2 rows of bfloat16 with AVX-512: 1.7 times as fast), and does not see lines that lie
// between those of one block (4 rows with AVX2: 1.8 times as fast).
inline void ask_panel(const char* w, int block) {
  if (block == 0)
    for (int b = 0; b < BLOCKS; b++) __builtin_prefetch(w + AHEAD + b * 64);
}

// Blocks of a panel that so many rows meet at once.
template <int MR>
constexpr int TOGETHER = MR == 1 ? BLOCKS : MR == 2 ? PAIR_BLOCKS : TALL_BLOCKS;

struct W8 {
  using Sum = I;
  static constexpr int ROWS = TALL;
  static int64_t panel_bytes(const LinearTask& t) { return t.depth * PANEL; }

  template <int MR, int NB>
  static inline void tile(const LinearTask& t, const char* panel, int64_t row, int block, I (&acc)[MR][NB]) {
    const int8_t* a = (const int8_t*)t.rows + row * t.row_stride;
#if defined(TW_MATRICES)
    if constexpr (MR % 2 == 0 && NB == 1) {
      multiply_pairs(a, t.row_stride, panel + block * 64, t.depth, acc);
      for (int r = 0; r < MR; r++) acc[r][0] = acc[r][0] - 128 * t.row_sums[(row + r + 1) * sums_of(t) - 1];
      return;
    }
#endif
    I sum[MR][NB];  // `acc` is read by a variable index later, for which GCC would store it in every step
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) sum[r][b] = splat((TAKEN - 128) * t.row_sums[(row + r + 1) * sums_of(t) - 1]);
    const char* w = panel + block * 64;
    for (int64_t k = 0; k < t.depth; k += 4, w += PANEL * 4) {
      U weight[NB];
      for (int b = 0; b < NB; b++) weight[b] = taken(load<U>(w + b * 64));
      ask_panel(w, block);
      for (int r = 0; r < MR; r++) {
        const int32_t four = read<int32_t>(a + r * t.row_stride + k);
        for (int b = 0; b < NB; b++) sum[r][b] = dot4<false>(sum[r][b], weight[b], four);
      }
    }
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) acc[r][b] = sum[r][b];
  }
};

// Bytes of one group of a 4-bit panel: a multiplier for each feature, then half a byte a weight.
inline int64_t group_bytes(const LinearTask& t) { return PANEL + t.group * PANEL / 2; }

// A weight is (n - 8) · m: a nibble and its group's multiplier, a whole number. So the sum over all groups is exact.
struct W4 {
  using Sum = I;
  static constexpr int ROWS = GROUPED;
  static int64_t panel_bytes(const LinearTask& t) { return t.depth / t.group * group_bytes(t); }

  template <int MR, int NB>
  static inline void tile(const LinearTask& t, const char* panel, int64_t row, int block, I (&acc)[MR][NB]) {
    const int8_t* a = (const int8_t*)t.rows + row * t.row_stride;
    const int64_t step = group_bytes(t), stride = sums_of(t);
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) acc[r][b] = I{};
    for (int64_t begin = 0; begin < t.depth; begin += t.group, panel += step) {
      I times[NB];
      for (int b = 0; b < NB; b++) times[b] = multipliers((const int8_t*)panel + (block + b) * LANES);
      const char* w = panel + PANEL + block * 64;
      for (int64_t part = begin; part < begin + t.group; part += SUMMED) {
        I sum[MR][NB];
        for (int r = 0; r < MR; r++)
          for (int b = 0; b < NB; b++) sum[r][b] = nibble_sums(t.row_sums[(row + r) * stride + part / SUMMED]);
#if defined(TW_WORDS)
#pragma GCC unroll 4  // GCC keeps the sums of a loop in memory
#endif
        for (int step = 0; step < int(SUMMED) / 8; step++, w += PANEL * 4) {
          const int64_t k = part + 8 * step;
          U raw[NB];
          for (int b = 0; b < NB; b++) raw[b] = load<U>(w + b * 64);
          ask_panel(w, block);
          for (int half = 0; half < 2; half++) {
            U weight[NB];
            for (int b = 0; b < NB; b++) weight[b] = nibbles(raw[b], half);
            for (int r = 0; r < MR; r++) {
              const int32_t four = read<int32_t>(a + r * t.row_stride + k + 4 * half);
              for (int b = 0; b < NB; b++) sum[r][b] = add_products(sum[r][b], weight[b], four);
            }
          }
        }
        for (int r = 0; r < MR; r++)
          for (int b = 0; b < NB; b++) acc[r][b] = add_scaled(acc[r][b], sum[r][b], times[b]);
      }
    }
  }

  // Input features `from` to `to` of a panel, whole steps of DEPTH, as W8 reads them.
  static void widen(const LinearTask& t, const char* panel, int64_t from, int64_t to, char* out) {
    for (int64_t k = from; k < to;) {
      const char* group = panel + k / t.group * group_bytes(t);
      const char* w = group + PANEL + k % t.group * (PANEL / 2);
      U times[BLOCKS], shift[BLOCKS];
      for (int b = 0; b < BLOCKS; b++) {
        const I m = multipliers((const int8_t*)group + b * LANES);
        times[b] = (U)m | ((U)m << 16);
        shift[b] = ((U)(128 - 8 * m) & 0xffu) * 0x01010101u;
      }
      const int64_t end = std::min(to, (k / t.group + 1) * t.group);
      for (; k < end; k += 8, w += PANEL * 4, out += PANEL * 8)
        for (int b = 0; b < BLOCKS; b++) {
          __builtin_prefetch(w + AHEAD + b * 64);
          const U raw = load<U>(w + b * 64);
          store(out + b * 64, scaled_bytes(nibbles(raw, 0), times[b], shift[b]));
          store(out + PANEL * 4 + b * 64, scaled_bytes(nibbles(raw, 1), times[b], shift[b]));
        }
    }
  }

  static inline I multipliers(const int8_t* from) { return small_integers(from) & 0xffff; }
};

struct BF16 {
  using Sum = F;
  static constexpr int ROWS = TALL;
  static int64_t panel_bytes(const LinearTask& t) { return t.depth * PANEL * 2; }

  template <int MR, int NB>
  static inline void tile(const LinearTask& t, const char* panel, int64_t row, int block, F (&out)[MR][NB]) {
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) out[r][b] = F{};
    add(t, panel, row, block, 0, t.depth, out);
  }

  // Input features `from` to `to`, which `panel` begins with.
  template <int MR, int NB>
  static inline void add(const LinearTask& t, const char* panel, int64_t row, int block, int64_t from, int64_t to,
                         F (&out)[MR][NB]) {
    const char* a = (const char*)t.rows + row * t.row_stride;
    const char* w = panel + block * 64;
    F sum[MR][NB];  // as in W8
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) sum[r][b] = out[r][b];
    for (int64_t k = from; k < to; k += 2, w += PANEL * 4) {
      U weight[NB];
      for (int b = 0; b < NB; b++) weight[b] = load<U>(w + b * 64);
      ask_panel(w, block);
      for (int r = 0; r < MR; r++) {
        const uint32_t two = read<uint32_t>(a + r * t.row_stride + 2 * k);
        for (int b = 0; b < NB; b++) sum[r][b] = dot2(sum[r][b], weight[b], two);
      }
    }
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) out[r][b] = sum[r][b];
  }
};

template <class T>
inline void put(T* out, F value, int64_t count) {
  if (count >= LANES) return store_f32(out, value);
  T all[LANES];
  store_f32(all, value);
  std::memcpy(out, all, count * sizeof(T));
}

// As many of sixteen as there are.
template <class T>
inline F load_some(const T* from, int64_t count) {
  return count >= LANES ? load_f32(from) : load_first(from, count);
}

// What the integers of one token stand for; `sum` is the first digit's, `low` the second's where there are two.
inline F real(const LinearTask& t, I sum, I low, int64_t token, int64_t feature) {
  F value = to_float(sum);
  if (t.digits == 2) value = fma(value, splat(float(tw::DIGIT)), to_float(low));
  return value * splat(t.row_scale[token]) * load<F>(t.scale + feature);
}
inline F real(const LinearTask&, F sum, F, int64_t, int64_t) { return sum; }

inline void put_token(const LinearTask& t, F value, int64_t token, int64_t feature) {
  const int64_t rest = t.features - feature, at = token * t.out_stride + feature;
  if (t.bias) value = value + load_some(t.bias + feature, rest);
  if (t.out_type == Type::f32)
    put((float*)t.out + at, value, rest);
  else
    put((uint16_t*)t.out + at, value, rest);
}

template <class Kind, int MR, int NB>
void rows_by_blocks(const LinearTask& t, const char* panel, int64_t first_feature, int64_t row) {
  for (int block = 0; block < BLOCKS; block += NB) {
    typename Kind::Sum sum[MR][NB];
    Kind::template tile<MR, NB>(t, panel, row, block, sum);
    for (int b = 0; b < NB; b++) {
      const int64_t feature = first_feature + (block + b) * LANES;
      if (feature >= t.features) break;
      for (int r = 0; r < MR; r += int(t.digits)) {
        const int64_t token = (row + r) / t.digits;
        put_token(t, real(t, sum[r][b], sum[r + t.digits - 1][b], token, feature), token, feature);
      }
    }
  }
}

template <class Kind, int MR>
void dispatch(int64_t rows, const LinearTask& t, const char* panel, int64_t feature, int64_t row) {
  if constexpr (MR > 1) {
    if (rows < MR) return dispatch<Kind, MR - 1>(rows, t, panel, feature, row);
  }
  rows_by_blocks<Kind, MR, TOGETHER<MR>>(t, panel, feature, row);
}

// All rows of a task against one panel, on vector registers.
template <class Kind>
void rows_by_vectors(const LinearTask& t, const char* panel, int64_t feature) {
  const int64_t tokens = t.row_end - t.row_begin, most = Kind::ROWS / t.digits, tiles = (tokens + most - 1) / most;
  for (int64_t i = 0; i < tiles; i++) {
    // Even tiles rather than full ones and a rest: no row count falls off a cliff.
    const int64_t begin = t.row_begin + tokens * i / tiles, end = t.row_begin + tokens * (i + 1) / tiles;
    dispatch<Kind, Kind::ROWS>((end - begin) * t.digits, t, panel, feature, begin * t.digits);
  }
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<void, Free>;

inline Bytes allocate(int64_t bytes) { return Bytes(std::aligned_alloc(64, (bytes + 63) / 64 * 64)); }

#if defined(TW_AMX)
inline I without_offset(const LinearTask& t, I sum, int64_t row) {
  return sum - 128 * t.row_sums[(row + 1) * sums_of(t) - 1];
}
inline F without_offset(const LinearTask&, F sum, int64_t) { return sum; }

// Sums of a block of rows, each PANEL wide, as the output's numbers.
template <class Sum, class Number>
void finish_rows(const LinearTask& t, const Number* sums, int64_t row, int64_t rows, int64_t first_feature) {
  const int64_t blocks = std::min<int64_t>(BLOCKS, (t.features - first_feature + LANES - 1) / LANES);
  for (int64_t r = 0; r < rows; r += t.digits, sums += t.digits * PANEL)
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t feature = first_feature + b * LANES, token = (row + r) / t.digits, last = t.digits - 1;
      const Sum sum = without_offset(t, load<Sum>(sums + b * LANES), row + r);
      const Sum low = without_offset(t, load<Sum>(sums + last * PANEL + b * LANES), row + r + last);
      put_token(t, real(t, sum, low, token, feature), token, feature);
    }
}

// Some panels against all rows of a task, on tiles. Many rows meet SPAN steps of all panels before the next, so that
// what is read of them stays in the second level of cache.
template <class Kind, class Panels>
class Tiled {
 public:
  Tiled(const LinearTask& t, const Panels& panels)
      : t(t),
        panels(panels),
        blocks((t.row_end - t.row_begin) * t.digits, t.digits),
        steps(Kind::panel_bytes(t) / STEP),
        span(std::min(steps, blocks.count == 1 ? Panels::FEW_STEPS : SPAN)),
        together(span == steps || blocks.count == 1 ? 1 : 4),
        scratch(allocate(together * blocks.count * BLOCK * sizeof(Number))) {}

  void run() const {
    const TilesInUse tiles;
    shape_tiles(blocks.rows);
    for (int64_t panel = t.panel_begin; panel < t.panel_end; panel += together)
      some(panel, std::min(panel + together, t.panel_end));
  }

 private:
  using Sum = typename Kind::Sum;
  using Number = std::remove_reference_t<decltype(Sum{}[0])>;
  static constexpr int64_t SPAN = 32, BLOCK = 2 * TILE_ROWS * PANEL;

  void some(int64_t first_panel, int64_t last_panel) const {
    const int64_t first = t.row_begin * t.digits;
    for (int64_t begin = 0; begin < steps; begin += span) {
      const int64_t end = std::min(begin + span, steps);
      Number* sums = (Number*)scratch.get();
      for (int64_t panel = first_panel; panel < last_panel; panel++, sums += blocks.count * BLOCK) {
        multiply_tiles<std::is_same_v<Sum, I>>((const char*)t.rows + first * t.row_stride + begin * 64, t.row_stride,
                                               blocks, panels.at(panel, begin, end), end - begin, !begin,
                                               panels.from_memory(panel + 1, begin), sums);
        if (end < steps) continue;
        for (int64_t block = 0; block < blocks.count; block++)
          finish_rows<Sum>(t, sums + block * BLOCK, first + blocks.start(block), blocks.rows, panel * PANEL);
      }
    }
  }

  const LinearTask& t;
  const Panels& panels;
  const RowBlocks blocks;
  const int64_t steps, span, together;  // panels whose sums are kept at a time
  const Bytes scratch;
};
#endif

// Panels as they lie in memory; a step is 16 lines of four blocks.
template <class Kind>
struct StoredPanels {
  static constexpr int64_t FEW_STEPS = 1 << 30;  // few rows take a panel from memory in one go
  const LinearTask& t;
  const char* at(int64_t panel, int64_t begin, int64_t) const {
    return (const char*)t.weight + panel * Kind::panel_bytes(t) + begin * 16 * PANEL * 4;
  }
  const char* from_memory(int64_t panel, int64_t begin) const { return at(panel, begin, 0); }
};

// 4-bit panels as W8 reads them, made when they are asked for.
struct WidenedPanels {
  static constexpr int64_t FEW_STEPS = 2;  // what was widened for few rows is read in the first level of cache
  const LinearTask& t;
  const Bytes wide;
  explicit WidenedPanels(const LinearTask& t) : t(t), wide(allocate(W8::panel_bytes(t))) {}
  const char* at(int64_t panel, int64_t begin, int64_t end) const {
    W4::widen(t, StoredPanels<W4>{t}.at(panel, 0, 0), begin * DEPTH, end * DEPTH, (char*)wide.get());
    return (const char*)wide.get();
  }
  const char* from_memory(int64_t, int64_t) const { return nullptr; }
};

// Panels of grouped numbers (codes.h), made bfloat16 when they are asked for.
template <class Code>
struct GroupedPanels {
  static constexpr int64_t FEW_STEPS = 2, STEP_DEPTH = 32;
  const LinearTask& t;
  const Bytes wide;
  explicit GroupedPanels(const LinearTask& t) : t(t), wide(allocate(BF16::panel_bytes(t))) {}

  const char* at(int64_t panel, int64_t begin, int64_t end) const {
    const int64_t bytes = tw::grouped_bytes(t.group, Code::BITS, Code::FLOATS);
    const char* first = (const char*)t.weight + panel * (t.depth / t.group) * bytes;
    char* out = (char*)wide.get();
    for (int64_t k = begin * STEP_DEPTH, stop; k < end * STEP_DEPTH; k = stop) {
      const char* group = first + k / t.group * bytes;
      const char* from = group + PANEL * tw::head_bytes(Code::BITS, Code::FLOATS);
      stop = std::min(end * STEP_DEPTH, (k / t.group + 1) * t.group);
      out = Code::widen(group, from + k % t.group * (PANEL * Code::BITS / 8), stop - k, out);
    }
    return (const char*)wide.get();
  }
  const char* from_memory(int64_t, int64_t) const { return nullptr; }
};

template <class Kind, class Panels>
void linear(const LinearTask& t, const Panels& panels) {
#if defined(TW_AMX)
  // bfloat16 sums depend on their order, so tiles take every row count there.
  if (std::is_same_v<Kind, BF16> || (t.row_end - t.row_begin) * t.digits >= TILED)
    return Tiled<Kind, Panels>(t, panels).run();
#endif
  for (int64_t panel = t.panel_begin; panel < t.panel_end; panel++)
    rows_by_vectors<Kind>(t, panels.at(panel, 0, Kind::panel_bytes(t) / (16 * PANEL * 4)), panel * PANEL);
}

void linear_w8(const LinearTask& t) { linear<W8>(t, StoredPanels<W8>{t}); }
void linear_bf16(const LinearTask& t) { linear<BF16>(t, StoredPanels<BF16>{t}); }

#if !defined(TW_AMX)
// At most MR rows: each part of a panel is multiplied as soon as it is widened, while it lies in the first level of
// cache.
template <int MR, class Panels>
void few_rows(const LinearTask& t, const Panels& panels) {
  constexpr int NB = TOGETHER<MR>;
  if constexpr (MR > 1) {
    if (t.row_end - t.row_begin < MR) return few_rows<MR - 1>(t, panels);
  }
  const int64_t steps = t.depth / Panels::STEP_DEPTH, span = Panels::FEW_STEPS;
  for (int64_t panel = t.panel_begin; panel < t.panel_end; panel++) {
    F sum[BLOCKS / NB][MR][NB] = {};
    for (int64_t begin = 0; begin < steps; begin += span) {
      const char* wide = panels.at(panel, begin, begin + span);
      const int64_t from = begin * Panels::STEP_DEPTH, to = from + span * Panels::STEP_DEPTH;
      for (int block = 0; block < BLOCKS; block += NB)
        BF16::add(t, wide, t.row_begin, block, from, to, sum[block / NB]);
    }
    for (int block = 0; block < BLOCKS; block++) {
      const int64_t feature = panel * PANEL + block * LANES;
      if (feature >= t.features) break;
      for (int r = 0; r < MR; r++) put_token(t, sum[block / NB][r][block % NB], t.row_begin + r, feature);
    }
  }
}
#endif

template <class Code>
void linear_grouped_of(const LinearTask& t) {
  const GroupedPanels<Code> panels(t);
#if !defined(TW_AMX)
  if (t.row_end - t.row_begin <= BF16::ROWS) return few_rows<BF16::ROWS>(t, panels);
#endif
  linear<BF16>(t, panels);
}

void linear_grouped(const LinearTask& t) {
  if (t.floats) return t.bits == 4 ? linear_grouped_of<E2M1>(t) : linear_grouped_of<E4M3>(t);
  return t.bits == 4 ? linear_grouped_of<WholeNumber<4>>(t) : linear_grouped_of<WholeNumber<8>>(t);
}

void linear_w4(const LinearTask& t) {
  if ((t.row_end - t.row_begin) * t.digits >= WIDENED) return linear<W8>(t, WidenedPanels(t));
  const StoredPanels<W4> panels{t};
  for (int64_t panel = t.panel_begin; panel < t.panel_end; panel++)
    rows_by_vectors<W4>(t, panels.at(panel, 0, 0), panel * PANEL);
}

// Scale a row to the levels of its digits and round it to integers.
template <class T>
void quantize_row(const T* x, int64_t features, int64_t row, const tw::QuantizedRows& to) {
  I peak = I{};  // a NaN is the largest of all, and makes the row's scale one
  int64_t i = 0;
  for (; i + LANES <= features; i += LANES) peak = max(peak, magnitude(load_f32(x + i)));
  float tail[LANES] = {};
  const int64_t rest = features - i;
  for (int64_t j = 0; j < rest; j++) {
    if constexpr (sizeof(T) == 4) tail[j] = x[i + j];
    else tail[j] = widen(x[i + j]);
  }
  const F last = load<F>(tail);
  const I all = max(peak, magnitude(last));
  int32_t most = 0;
  for (int j = 0; j < LANES; j++) most = all[j] > most ? all[j] : most;
  const float top = read<float>(&most), levels = to.digits == 2 ? tw::LEVELS_16 : tw::LEVELS_8;
  to.scale[row] = top / levels;
  const F inverse = splat(top > levels * tw::SMALLEST_STEP ? levels / top : 0.0f);
  int8_t* q = to.q + row * to.digits * to.stride;
  for (int64_t k = 0; k < to.depth; k += LANES) {
    const F v = k < i ? load_f32(x + k) : k == i ? last : F{};
    const I whole = round_to_int(v * inverse);
    if (to.digits == 1) {
      store_s8(q + k, whole);
    } else {
      const I high = round_to_int(to_float(whole) * splat(1.0f / tw::DIGIT));
      store_s8(q + k, high);
      store_s8(q + to.stride + k, whole - high * tw::DIGIT);
    }
  }
  const int64_t count = to.depth / tw::SUMMED;
  for (int64_t digit = 0; digit < to.digits; digit++, q += to.stride) {
    int32_t* sums = to.sums + (row * to.digits + digit) * (count + 1);
    sums[count] = 0;
    for (int64_t g = 0; g < count; g++) sums[count] += sums[g] = byte_sum32(q + g * tw::SUMMED);
  }
}

void quantize(const void* x, Type type, int64_t features, int64_t row, const tw::QuantizedRows& to) {
  if (type == Type::f32) return quantize_row((const float*)x + row * features, features, row, to);
  quantize_row((const uint16_t*)x + row * features, features, row, to);
}

// A row as bfloat16, padded with zeros to `depth`; rows lie `stride` values apart.
void widen_row(const void* x, Type type, int64_t features, int64_t row, uint16_t* to, int64_t depth, int64_t stride) {
  uint16_t* out = to + row * stride;
  int64_t k = 0;
  if (type == Type::f32) {
    const float* full = (const float*)x + row * features;
    for (; k + LANES <= features; k += LANES) store_f32(out + k, load_f32(full + k));
    for (; k < features; k++) out[k] = narrow(full[k]);
  } else {
    std::memcpy(out, (const uint16_t*)x + row * features, (k = features) * 2);
  }
  for (; k < depth; k++) out[k] = 0;
}

}  // namespace TW_ISA
