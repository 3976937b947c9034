// Linear layers over packed weights: 8-bit weights on 8-bit activations, 4-bit on 8-bit, 4-bit on bfloat16, bfloat16.
//
// A panel holds PANEL output features as blocks of 16 (one lane each); its bytes are read in one direction, so that a
// single row streams it from memory, and a tile of rows shares every vector it loads. A row's result is the same to
// the bit whatever tile it fell into: integers are exact, and the float operations on it are the same in all.
#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::LinearTask;
using tw::PANEL;
using tw::Type;

constexpr int BLOCKS = PANEL / LANES;
#if defined(__AVX512F__)
// 12 × 2 (or 4 × 4) accumulators leave room for the weights in 32 registers.
constexpr int TALL = 12, WIDE = 4, GROUPED = 6, TALL_BLOCKS = 2;
#else
constexpr int TALL = 4, WIDE = 1, GROUPED = 4, TALL_BLOCKS = 1;
#endif
constexpr int AHEAD = 2048;  // bytes to prefetch ahead in a panel that comes from memory

inline U nibbles(U x, int which) { return (which ? x >> 4 : x) & 0x0f0f0f0fu; }

struct W8A8 {
  static constexpr int ROWS = TALL;
  static int64_t panel_bytes(const LinearTask& t) { return t.depth * PANEL; }

  template <int MR, int NB>
  static inline void tile(const LinearTask& t, const char* panel, int64_t row, int block, F (&out)[MR][NB]) {
    I acc[MR][NB];
    const int8_t* a = (const int8_t*)t.rows + row * t.depth;
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) acc[r][b] = splat(-128 * t.row_sums[row + r]);
    const char* w = panel + block * 64;
    for (int64_t k = 0; k < t.depth; k += 4, w += PANEL * 4) {
      U weight[NB];
      for (int b = 0; b < NB; b++) weight[b] = load<U>(w + b * 64);
      if constexpr (MR == 1)
        for (int b = 0; b < NB; b++) __builtin_prefetch(w + AHEAD + b * 64);
      for (int r = 0; r < MR; r++) {
        const int32_t four = read<int32_t>(a + r * t.depth + k);
        for (int b = 0; b < NB; b++) acc[r][b] = dot4<false>(acc[r][b], weight[b], four);
      }
    }
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) out[r][b] = to_float(acc[r][b]) * splat(t.row_scale[row + r]);
  }

  static inline F finish(const LinearTask& t, F value, int64_t feature) {
    return value * load<F>(t.scale + feature);
  }
};

// Bytes of one group of a 4-bit panel: its scales (bfloat16), then half a byte a weight.
inline int64_t group_bytes(const LinearTask& t) { return PANEL * 2 + t.group * PANEL / 2; }

struct W4A8 {
  static constexpr int ROWS = GROUPED;
  static int64_t panel_bytes(const LinearTask& t) { return t.depth / t.group * group_bytes(t); }

  template <int MR, int NB>
  static inline void tile(const LinearTask& t, const char* panel, int64_t row, int block, F (&out)[MR][NB]) {
    const int64_t groups = t.depth / t.group, step = group_bytes(t);
    const int8_t* a = (const int8_t*)t.rows + row * t.depth;
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) out[r][b] = F{};
    for (int64_t g = 0; g < groups; g++, panel += step) {
      I acc[MR][NB];
      for (int r = 0; r < MR; r++)
        for (int b = 0; b < NB; b++) acc[r][b] = splat(-8 * t.row_sums[(row + r) * groups + g]);
      const char* w = panel + PANEL * 2 + block * 64;
      for (int64_t k = g * t.group; k < (g + 1) * t.group; k += 8, w += PANEL * 4) {
        U raw[NB];
        for (int b = 0; b < NB; b++) raw[b] = load<U>(w + b * 64);
        if constexpr (MR == 1)
          for (int b = 0; b < NB; b++) __builtin_prefetch(w + AHEAD + b * 64);
        for (int half = 0; half < 2; half++) {
          U weight[NB];
          for (int b = 0; b < NB; b++) weight[b] = nibbles(raw[b], half);
          for (int r = 0; r < MR; r++) {
            const int32_t four = read<int32_t>(a + r * t.depth + k + 4 * half);
            for (int b = 0; b < NB; b++) acc[r][b] = dot4<true>(acc[r][b], weight[b], four);
          }
        }
      }
      for (int b = 0; b < NB; b++) {
        const F scale = load_f32((const uint16_t*)panel + (block + b) * LANES);
        for (int r = 0; r < MR; r++) out[r][b] = fma(to_float(acc[r][b]), scale, out[r][b]);
      }
    }
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) out[r][b] = out[r][b] * splat(t.row_scale[row + r]);
  }

  static inline F finish(const LinearTask&, F value, int64_t) { return value; }
};

// A nibble n below bfloat16's 0x4300 is the number 128 + n: no table, no conversion. The activations come paired
// (`widen_rows`), since nibbles j and j + 4 of a lane meet in one dot2.
struct W4A16 {
  static constexpr int ROWS = GROUPED;
  static int64_t panel_bytes(const LinearTask& t) { return W4A8::panel_bytes(t); }

  template <int MR, int NB>
  static inline void tile(const LinearTask& t, const char* panel, int64_t row, int block, F (&out)[MR][NB]) {
    const int64_t groups = t.depth / t.group, step = group_bytes(t);
    const uint16_t* a = (const uint16_t*)t.rows + row * t.depth;
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) out[r][b] = F{};
    for (int64_t g = 0; g < groups; g++, panel += step) {
      F acc[MR][NB];
      for (int r = 0; r < MR; r++)
        for (int b = 0; b < NB; b++) acc[r][b] = splat(-136.0f * t.row_sums_f[(row + r) * groups + g]);
      const char* w = panel + PANEL * 2 + block * 64;
      for (int64_t k = g * t.group; k < (g + 1) * t.group; k += 8, w += PANEL * 4) {
        U raw[NB];
        for (int b = 0; b < NB; b++) raw[b] = load<U>(w + b * 64);
        if constexpr (MR == 1)
          for (int b = 0; b < NB; b++) __builtin_prefetch(w + AHEAD + b * 64);
        for (int j = 0; j < 4; j++) {
          U weight[NB];
          for (int b = 0; b < NB; b++) weight[b] = ((raw[b] >> (4 * j)) & 0x000f000fu) | 0x43004300u;
          for (int r = 0; r < MR; r++) {
            const uint32_t two = read<uint32_t>(a + r * t.depth + k + 2 * j);
            for (int b = 0; b < NB; b++) acc[r][b] = dot2(acc[r][b], weight[b], two);
          }
        }
      }
      for (int b = 0; b < NB; b++) {
        const F scale = load_f32((const uint16_t*)panel + (block + b) * LANES);
        for (int r = 0; r < MR; r++) out[r][b] = fma(acc[r][b], scale, out[r][b]);
      }
    }
  }

  static inline F finish(const LinearTask&, F value, int64_t) { return value; }
};

struct BF16 {
  static constexpr int ROWS = TALL;
  static int64_t panel_bytes(const LinearTask& t) { return t.depth * PANEL * 2; }

  template <int MR, int NB>
  static inline void tile(const LinearTask& t, const char* panel, int64_t row, int block, F (&out)[MR][NB]) {
    const uint16_t* a = (const uint16_t*)t.rows + row * t.depth;
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) out[r][b] = F{};
    const char* w = panel + block * 64;
    for (int64_t k = 0; k < t.depth; k += 2, w += PANEL * 4) {
      U weight[NB];
      for (int b = 0; b < NB; b++) weight[b] = load<U>(w + b * 64);
      if constexpr (MR == 1)
        for (int b = 0; b < NB; b++) __builtin_prefetch(w + AHEAD + b * 64);
      for (int r = 0; r < MR; r++) {
        const uint32_t two = read<uint32_t>(a + r * t.depth + k);
        for (int b = 0; b < NB; b++) out[r][b] = dot2(out[r][b], weight[b], two);
      }
    }
  }

  static inline F finish(const LinearTask&, F value, int64_t) { return value; }
};

template <class T>
inline void put(T* out, F value, int64_t count) {
  if (count >= LANES) return store_f32(out, value);
  T all[LANES];
  store_f32(all, value);
  std::memcpy(out, all, count * sizeof(T));
}

// As many of sixteen as there are.
inline F load_some(const float* from, int64_t count) {
  if (count >= LANES) return load<F>(from);
  F all = F{};
  std::memcpy(&all, from, count * sizeof(float));
  return all;
}

template <class Kind, int MR, int NB>
void rows_by_blocks(const LinearTask& t, const char* panel, int64_t first_feature, int64_t row) {
  for (int block = 0; block < BLOCKS; block += NB) {
    F out[MR][NB];
    Kind::template tile<MR, NB>(t, panel, row, block, out);
    for (int b = 0; b < NB; b++) {
      const int64_t feature = first_feature + (block + b) * LANES;
      if (feature >= t.features) break;
      const F bias = t.bias ? load_some(t.bias + feature, t.features - feature) : F{};
      for (int r = 0; r < MR; r++) {
        F value = Kind::finish(t, out[r][b], feature);
        if (t.bias) value = value + bias;
        const int64_t at = (row + r) * t.out_stride + feature;
        if (t.out_type == Type::f32)
          put((float*)t.out + at, value, t.features - feature);
        else
          put((uint16_t*)t.out + at, value, t.features - feature);
      }
    }
  }
}

template <class Kind, int MR>
void dispatch(int64_t rows, const LinearTask& t, const char* panel, int64_t feature, int64_t row) {
  if constexpr (MR > 1) {
    if (rows < MR) return dispatch<Kind, MR - 1>(rows, t, panel, feature, row);
  }
  rows_by_blocks<Kind, MR, (MR <= WIDE ? BLOCKS : TALL_BLOCKS)>(t, panel, feature, row);
}

template <class Kind>
void linear(const LinearTask& t) {
  const int64_t bytes = Kind::panel_bytes(t), rows = t.row_end - t.row_begin;
  const int64_t tiles = (rows + Kind::ROWS - 1) / Kind::ROWS;
  for (int64_t panel = t.panel_begin; panel < t.panel_end; panel++) {
    const char* weight = (const char*)t.weight + panel * bytes;
    for (int64_t i = 0; i < tiles; i++) {
      // Even tiles rather than full ones and a rest: no row count falls off a cliff.
      const int64_t begin = t.row_begin + rows * i / tiles, end = t.row_begin + rows * (i + 1) / tiles;
      dispatch<Kind, Kind::ROWS>(end - begin, t, weight, panel * PANEL, begin);
    }
  }
}

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
  const float top = read<float>(&most);
  to.scale[row] = top / 127;
  const F inverse = splat(top > tw::SMALLEST_PEAK ? 127 / top : 0.0f);
  int8_t* q = to.q + row * to.depth;
  for (int64_t k = 0; k < to.depth; k += LANES) {
    const F v = k < i ? load_f32(x + k) : k == i ? last : F{};
    store_s8(q + k, round_to_int(v * inverse));
  }
  const int64_t groups = to.depth / to.group;
  for (int64_t g = 0; g < groups; g++) {
    // Σ q by the byte dot product with ones.
    I total = I{};
    const U ones = U{} + 0x01010101u;
    for (int64_t k = 0; k < to.group; k += 4) total = dot4<true>(total, ones, read<int32_t>(q + g * to.group + k));
    to.sums[row * groups + g] = total[0];
  }
}

void quantize(const void* x, Type type, int64_t features, int64_t row, const tw::QuantizedRows& to) {
  if (type == Type::f32) return quantize_row((const float*)x + row * features, features, row, to);
  quantize_row((const uint16_t*)x + row * features, features, row, to);
}

// A row as bfloat16, padded with zeros to `depth`; `paired` orders each eight values as W4A16's nibbles meet them.
void widen_rows(const void* x, Type type, int64_t features, int64_t row, uint16_t* to, int64_t depth, int64_t group,
                float* sums, bool paired) {
  static constexpr int ORDER[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  uint16_t* out = to + row * depth;
  const uint16_t* half = (const uint16_t*)x + row * features;
  const float* full = (const float*)x + row * features;
  auto value = [&](int64_t k) -> uint16_t {
    if (k >= features) return 0;
    return type == Type::f32 ? narrow(full[k]) : half[k];
  };
  if (!paired) {
    int64_t k = 0;
    if (type == Type::f32)
      for (; k + LANES <= features; k += LANES) store_f32(out + k, load_f32(full + k));
    else
      std::memcpy(out, half, (k = features) * 2);
    for (; k < depth; k++) out[k] = value(k);
    return;
  }
  for (int64_t k = 0; k < depth; k += 8)
    for (int j = 0; j < 8; j++) out[k + j] = value(k + ORDER[j]);
  for (int64_t g = 0; g < depth / group; g++) {
    F total = F{};
    for (int64_t k = 0; k < group; k += LANES) total = total + load_f32(out + g * group + k);
    sums[row * (depth / group) + g] = sum(total);
  }
}

void linear_w8a8(const LinearTask& t) { linear<W8A8>(t); }
void linear_w4a8(const LinearTask& t) { linear<W4A8>(t); }
void linear_w4a16(const LinearTask& t) { linear<W4A16>(t); }
void linear_bf16(const LinearTask& t) { linear<BF16>(t); }

}  // namespace TW_ISA
