// LSTM and GRU cells in float32. A sum runs over the units of the step before in their order, whatever rows or threads
// share a step, so that neither changes a bit of a row.
#include "cells.h"
#include "vec.h"

namespace TW_ISA {

namespace cells {

// Rows whose sums of so many gates are in registers at a time.
#if defined(__AVX512F__)
constexpr int ROWS = 4, GATES = 4;
#else
constexpr int ROWS = 3, GATES = 2;  // of sixteen registers twelve, and of NEON's 32 twenty-four
#endif
constexpr int64_t CHUNK = 32;   // units whose weights stay in the first cache while rows read them: 8 KB with four gates
constexpr int64_t MOST = 64;    // rows whose sums lie on the stack: 16 KB

inline void store_first(float* to, F x, int64_t count) {
  if (count == LANES) return store_f32(to, x);
  for (int64_t i = 0; i < count; i++) to[i] = x[i];
}
inline F load_some(const float* from, int64_t count) {
  return count == LANES ? load_f32(from) : load_first(from, count);
}

// What N rows of the step before add to their sums, (row, gate, 16), over some units: M gates of G, from the first.
template <int G, int M, int N>
inline void add_gates(const float* const* before, const float* weight, int64_t begin, int64_t end, float* sums) {
  F sum[N][M];
  for (int n = 0; n < N; n++)
    for (int g = 0; g < M; g++) sum[n][g] = load_f32(sums + (n * G + g) * LANES);
  for (int64_t k = begin; k < end; k++)
    for (int g = 0; g < M; g++) {
      const F w = load_f32(weight + (k * G + g) * LANES);
      for (int n = 0; n < N; n++) sum[n][g] = fma(splat(before[n][k]), w, sum[n][g]);
    }
  for (int n = 0; n < N; n++)
    for (int g = 0; g < M; g++) store_f32(sums + (n * G + g) * LANES, sum[n][g]);
}

// The same of all gates.
template <int G, int N>
inline void add_products(const float* const* before, const float* weight, int64_t begin, int64_t end, float* sums) {
  constexpr int M = N > 1 && GATES < G ? GATES : G;
  for (int g = 0; g + M <= G; g += M)
    add_gates<G, M, N>(before, weight + g * LANES, begin, end, sums + g * LANES);
  if constexpr (G % M) {
    constexpr int DONE = G / M * M;
    add_gates<G, G % M, N>(before, weight + DONE * LANES, begin, end, sums + DONE * LANES);
  }
}

// All sums of `rows` rows of a block; `sums` has what they begin with.
template <int G>
void sum_products(const tw::CellTask& t, int64_t step, int64_t row, int64_t rows, int64_t block, float* sums) {
  const float* before[MOST];
  for (int64_t n = 0; n < rows; n++) before[n] = t.state(step, row + n);
  const float* const weight = t.weight + block * t.size * G * LANES;
  const int64_t chunk = rows > ROWS ? CHUNK : t.size;
  for (int64_t begin = 0; begin < t.size; begin += chunk) {
    const int64_t end = begin + chunk < t.size ? begin + chunk : t.size;
    int64_t n = 0;
    for (; n + ROWS <= rows; n += ROWS) add_products<G, ROWS>(before + n, weight, begin, end, sums + n * G * LANES);
    for (; n + 2 <= rows; n += 2) add_products<G, 2>(before + n, weight, begin, end, sums + n * G * LANES);
    for (; n < rows; n++) add_products<G, 1>(before + n, weight, begin, end, sums + n * G * LANES);
  }
}

// One step of some blocks of some rows. `begin(gates, unit, count, sums)` says what a row's sums begin with, and
// `end(row, gates, unit, count, sums)` makes its output of them.
template <int G, class Begin, class End>
void step_of(const tw::CellTask& t, int64_t step, int64_t row_begin, int64_t row_end, int64_t block_begin,
             int64_t block_end, const Begin& begin, const End& end) {
  alignas(64) float sums[MOST * G * LANES];
  const float* const gates = t.gates + t.place(step) * t.gate_step;
  float* const out = t.out + t.place(step) * t.out_step;
  for (int64_t row = row_begin; row < row_end; row += MOST) {
    const int64_t rows = row_end - row < MOST ? row_end - row : MOST;
    for (int64_t block = block_begin; block < block_end; block++) {
      const int64_t unit = block * LANES, count = t.size - unit < LANES ? t.size - unit : LANES;
      for (int64_t n = 0; n < rows; n++)
        begin(gates + (row + n) * t.gate_row + unit, unit, count, sums + n * G * LANES);
      sum_products<G>(t, step, row, rows, block, sums);
      for (int64_t n = 0; n < rows; n++) {
        const F y = end(row + n, gates + (row + n) * t.gate_row + unit, unit, count, sums + n * G * LANES);
        store_first(out + (row + n) * t.out_row + unit, y, count);
        store_first(t.state(step + 1, row + n) + unit, y, count);
      }
    }
  }
}

}  // namespace cells

void lstm_step(const tw::CellTask& t, int64_t step, int64_t row_begin, int64_t row_end, int64_t block_begin,
               int64_t block_end) {
  const auto begin = [&](const float* gates, int64_t, int64_t count, float* sums) {
    for (int g = 0; g < 4; g++) store_f32(sums + g * LANES, cells::load_some(gates + g * t.size, count));
  };
  const auto end = [&](int64_t row, const float*, int64_t unit, int64_t count, const float* sums) {
    const F input = sigmoid(load_f32(sums)), forget = sigmoid(load_f32(sums + LANES));
    const F fresh = tanh(load_f32(sums + 2 * LANES)), output = sigmoid(load_f32(sums + 3 * LANES));
    float* const cell = t.cell + row * t.size + unit;
    const F c = forget * cells::load_some(cell, count) + input * fresh;
    cells::store_first(cell, c, count);
    return output * tanh(c);
  };
  cells::step_of<4>(t, step, row_begin, row_end, block_begin, block_end, begin, end);
}

void gru_step(const tw::CellTask& t, int64_t step, int64_t row_begin, int64_t row_end, int64_t block_begin,
              int64_t block_end) {
  const auto begin = [&](const float* gates, int64_t unit, int64_t count, float* sums) {
    for (int g = 0; g < 2; g++) store_f32(sums + g * LANES, cells::load_some(gates + g * t.size, count));
    store_f32(sums + 2 * LANES, load_f32(t.bias + unit));
  };
  const auto end = [&](int64_t row, const float* gates, int64_t unit, int64_t count, const float* sums) {
    const F reset = sigmoid(load_f32(sums)), update = sigmoid(load_f32(sums + LANES));
    const F fresh = tanh(cells::load_some(gates + 2 * t.size, count) + reset * load_f32(sums + 2 * LANES));
    const F before = cells::load_some(t.state(step, row) + unit, count);
    return (1.0f - update) * fresh + update * before;
  };
  cells::step_of<3>(t, step, row_begin, row_end, block_begin, block_end, begin, end);
}

}  // namespace TW_ISA
