// 4-bit weights: the scale of each group that loses least, found by trying several.
#include <cmath>

#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

// One row of `features` weights in groups; `shrinks` are the fractions of the full scale to try. See
// kernels/pack.py, which says the same in PyTorch.
void quantize_w4(const float* weight, const float* importance, int64_t features, int64_t group, const float* shrinks,
                 int64_t count, int8_t* integers, uint16_t* scales) {
  for (int64_t begin = 0; begin < features; begin += group) {
    const float* w = weight + begin;
    float largest = 0;
    for (int64_t i = 0; i < group; i++)
      if (std::fabs(w[i]) > std::fabs(largest)) largest = w[i];
    const float full = (std::fabs(largest) < 1e-12f ? 1e-12f : largest) / -8;
    float best_error = INFINITY;
    uint16_t best = narrow(full);
    for (int64_t c = 0; c < count; c++) {
      const uint16_t bits = narrow(full * shrinks[c]);
      const float scale = widen(bits);
      const F inverse = splat(1 / scale);
      F error = F{};
      for (int64_t i = 0; i < group; i += LANES) {
        const F x = load<F>(w + i);
        F q = to_float(round_to_int(x * inverse));
        q = q > 7.0f ? splat(7.0f) : q < -8.0f ? splat(-8.0f) : q;
        const F miss = q * scale - x;
        error = error + miss * miss * load<F>(importance + begin + i);
      }
      const float total = sum(error);
      if (total < best_error) best_error = total, best = bits;
    }
    const F inverse = splat(1 / widen(best));
    for (int64_t i = 0; i < group; i += LANES) {
      F q = to_float(round_to_int(load<F>(w + i) * inverse));
      q = q > 7.0f ? splat(7.0f) : q < -8.0f ? splat(-8.0f) : q;
      store_s8(integers + begin + i, round_to_int(q));
    }
    scales[begin / group] = best;
  }
}

}  // namespace TW_ISA
