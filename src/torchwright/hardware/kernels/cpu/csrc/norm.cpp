// LayerNorm and RMSNorm of rows in float32 arithmetic. A row is read from memory once: its further sweeps find it in
// the first level of cache.
#include <algorithm>
#include <cmath>

#include "norm.h"
#include "vec.h"

namespace TW_ISA {

using tw::NormBackwardTask;
using tw::NormTask;
using tw::Type;

// whole(place) for each vector, then rest(place) for each number that no vector holds.
template <class Whole, class Rest>
inline void sweep(int64_t features, const Whole& whole, const Rest& rest) {
  int64_t i = 0;
  for (; i + LANES <= features; i += LANES) whole(i);
  for (; i < features; i++) rest(i);
}

// Σ over a row: whole(sum, place) adds a vector, rest(place) is a number. Four sums, so that one addition need not
// wait for another.
template <class Whole, class Rest>
inline float total_of(int64_t features, const Whole& whole, const Rest& rest) {
  F sums[4] = {};
  float last = 0;
  int64_t i = 0;
  for (; i + 4 * LANES <= features; i += 4 * LANES)
    for (int j = 0; j < 4; j++) whole(sums[j], i + j * LANES);
  for (; i + LANES <= features; i += LANES) whole(sums[0], i);
  for (; i < features; i++) last += rest(i);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + last;
}

// A row less its mean.
template <bool CENTERED, class T>
struct Centered {
  const T* x;
  float mean;

  F at(int64_t i) const { return CENTERED ? load_f32(x + i) - splat(mean) : load_f32(x + i); }
  float one(int64_t i) const { return CENTERED ? get(x + i) - mean : get(x + i); }
};

template <bool CENTERED, class T>
void norm_row(const NormTask& t, int64_t row) {
  const int64_t n = t.features;
  const T* x = (const T*)t.x + row * n;
  if (t.residual) {
    const T* residual = (const T*)t.residual + row * n;
    T* sum_out = (T*)t.sum + row * n;
    sweep(
        n, [&](int64_t i) { store_f32(sum_out + i, load_f32(x + i) + load_f32(residual + i)); },
        [&](int64_t i) { set(sum_out + i, get(x + i) + get(residual + i)); });
    x = sum_out;
  }
  Centered<CENTERED, T> v{x, 0};
  if (CENTERED)
    v.mean = total_of(
                 n, [&](F& sum, int64_t i) { sum = sum + load_f32(x + i); }, [&](int64_t i) { return get(x + i); }) /
             float(n);
  // Around the mean, not from the sum of squares: that has no digits left where the mean is large.
  const float squares = total_of(
      n, [&](F& sum, int64_t i) { sum = fma(v.at(i), v.at(i), sum); }, [&](int64_t i) { return v.one(i) * v.one(i); });
  const float inverse = 1 / std::sqrt(squares / float(n) + t.eps);
  T* out = (T*)t.out + row * n;
  const F factor = splat(inverse);
  const float *weight = t.weight, *bias = t.bias;
  sweep(
      n,
      [&](int64_t i) {
        __builtin_prefetch(x + n + i);  // the next row, whose sums would wait for it
        const F y = v.at(i) * factor;
        store_f32(out + i, bias ? fma(y, load<F>(weight + i), load<F>(bias + i)) : weight ? y * load<F>(weight + i) : y);
      },
      [&](int64_t i) {
        const float y = v.one(i) * inverse;
        set(out + i, bias ? y * weight[i] + bias[i] : weight ? y * weight[i] : y);
      });
  if (t.mean) t.mean[row] = v.mean;
  if (t.inverse) t.inverse[row] = inverse;
}

void norm(const NormTask& t, int64_t row) {
  if (t.type == Type::f32) return t.centered ? norm_row<true, float>(t, row) : norm_row<false, float>(t, row);
  return t.centered ? norm_row<true, uint16_t>(t, row) : norm_row<false, uint16_t>(t, row);
}

// Σ gradient · weight · normed, and of rows with a mean Σ gradient · weight.
struct Along {
  float along, level;
};

template <bool CENTERED, class Normed, class Weighted, class NormedOne, class WeightedOne>
inline Along sums_along(int64_t features, const Normed& normed, const Weighted& weighted, const NormedOne& normed_one,
                        const WeightedOne& weighted_one) {
  F along[2] = {}, level[2] = {};
  Along found{};
  int64_t i = 0;
  for (; i + 2 * LANES <= features; i += 2 * LANES)
    for (int j = 0; j < 2; j++) {
      const F g = weighted(i + j * LANES);
      along[j] = fma(g, normed(i + j * LANES), along[j]);
      if (CENTERED) level[j] = level[j] + g;
    }
  for (; i < features; i++) {
    found.along += weighted_one(i) * normed_one(i);
    if (CENTERED) found.level += weighted_one(i);
  }
  found.along += sum(along[0] + along[1]);
  if (CENTERED) found.level += sum(level[0] + level[1]);
  return found;
}

template <bool CENTERED, bool WEIGHTED, class T>
void norm_backward_row(const NormBackwardTask& t, int64_t row, float* d_weight, float* d_bias) {
  const int64_t n = t.features;
  const T* grad = (const T*)t.grad + row * n;
  const float inverse = t.inverse[row], *weight = t.weight;
  const Centered<CENTERED, T> v{(const T*)t.x + row * n, CENTERED ? t.mean[row] : 0};
  const F factor = splat(inverse);
  const auto normed = [&](int64_t i) { return v.at(i) * factor; };
  const auto normed_one = [&](int64_t i) { return v.one(i) * inverse; };
  const auto weighted = [&](int64_t i) {
    return WEIGHTED ? load_f32(grad + i) * load<F>(weight + i) : load_f32(grad + i);
  };
  const auto weighted_one = [&](int64_t i) { return WEIGHTED ? get(grad + i) * weight[i] : get(grad + i); };
  T* d_x = t.d_x ? (T*)t.d_x + row * n : nullptr;
  const Along sums = d_x ? sums_along<CENTERED>(n, normed, weighted, normed_one, weighted_one) : Along{};
  const float along = sums.along / float(n), level = sums.level / float(n);
  const F part = splat(along), shift = splat(level);
  sweep(
      n,
      [&](int64_t i) {
        __builtin_prefetch(v.x + n + i), __builtin_prefetch(grad + n + i);  // the next row, as above
        const F y = normed(i), g = load_f32(grad + i);
        if (d_x) {
          const F whole = WEIGHTED ? g * load<F>(weight + i) : g;
          store_f32(d_x + i, ((CENTERED ? whole - shift : whole) - y * part) * factor);
        }
        if (d_weight) store(d_weight + i, fma(g, y, load<F>(d_weight + i)));
        if (d_bias) store(d_bias + i, load<F>(d_bias + i) + g);
      },
      [&](int64_t i) {
        if (d_x) set(d_x + i, ((CENTERED ? weighted_one(i) - level : weighted_one(i)) - normed_one(i) * along) * inverse);
        if (d_weight) d_weight[i] += get(grad + i) * normed_one(i);
        if (d_bias) d_bias[i] += get(grad + i);
      });
}

template <bool CENTERED, class T>
void norm_backward_rows(const NormBackwardTask& t, int64_t begin, int64_t end) {
  float* sums[2];
  for (int i = 0; i < 2; i++) {
    float* all = i ? t.d_bias : t.d_weight;
    sums[i] = all ? all + begin / t.block * t.features : nullptr;
    if (all) std::fill(sums[i], sums[i] + t.features, 0.0f);
  }
  for (int64_t row = begin; row < end; row++)
    if (t.weight) norm_backward_row<CENTERED, true, T>(t, row, sums[0], sums[1]);
    else norm_backward_row<CENTERED, false, T>(t, row, sums[0], sums[1]);
}

void norm_backward(const NormBackwardTask& t, int64_t begin, int64_t end) {
  if (t.type == Type::f32)
    return t.mean ? norm_backward_rows<true, float>(t, begin, end) : norm_backward_rows<false, float>(t, begin, end);
  return t.mean ? norm_backward_rows<true, uint16_t>(t, begin, end) : norm_backward_rows<false, uint16_t>(t, begin, end);
}

}  // namespace TW_ISA
