// 4-bit weights: the multiplier of each group that loses least, found by trying several.
#include <cmath>

#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

constexpr float SMALLEST_WEIGHT = 1e-12f;

// The scale that puts a group's largest weight on -8, the longer side of the range.
inline float full_scale(const float* w, int64_t group) {
  float largest = 0;
  for (int64_t i = 0; i < group; i++)
    if (std::fabs(w[i]) > std::fabs(largest)) largest = w[i];
  return (std::fabs(largest) < SMALLEST_WEIGHT ? SMALLEST_WEIGHT : largest) / -8;
}

inline F nearest_nibble(F x, F inverse) {
  const F q = to_float(round_to_int(x * inverse));
  return select(q > 7.0f, splat(7.0f), select(q < -8.0f, splat(-8.0f), q));
}

// One row of `features` weights in groups. See kernels/pack.py, which says the same in PyTorch.
void quantize_w4(const float* weight, const float* importance, int64_t features, int64_t group, int8_t* integers,
                 int8_t* multipliers, float* scale) {
  float widest = 0;
  for (int64_t begin = 0; begin < features; begin += group)
    widest = std::fmax(widest, std::fabs(full_scale(weight + begin, group)));
  *scale = widest / 15;
  for (int64_t begin = 0; begin < features; begin += group) {
    const float* w = weight + begin;
    const float full = full_scale(w, group) / *scale;
    const int sign = full < 0 ? -1 : 1;
    const float size = std::fabs(full);
    const int first = std::max(1, int(std::floor(0.64f * size))), last = std::min(15, int(std::ceil(1.03f * size)));
    float best_error = INFINITY;
    int best = last;
    for (int m = last; m >= first; m--) {
      const F step = splat(*scale * float(sign * m)), inverse = splat(1 / (*scale * float(sign * m)));
      F error = F{};
      for (int64_t i = 0; i < group; i += LANES) {
        const F x = load<F>(w + i), miss = nearest_nibble(x, inverse) * step - x;
        error = error + miss * miss * load<F>(importance + begin + i);
      }
      const float total = sum(error);
      if (total < best_error) best_error = total, best = m;
    }
    const F inverse = splat(1 / (*scale * float(sign * best)));
    for (int64_t i = 0; i < group; i += LANES)
      store_s8(integers + begin + i, round_to_int(nearest_nibble(load<F>(w + i), inverse)));
    multipliers[begin / group] = int8_t(sign * best);
  }
}

}  // namespace TW_ISA
