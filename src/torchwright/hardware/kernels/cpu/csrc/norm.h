// Norms of rows, forward and backward.
#pragma once

#include "kernels.h"

namespace tw {

// out = (x - mean) · inverse · weight + bias, of x alone or of x + residual, whose sum is stored and read as stored.
struct NormTask {
  const void *x, *residual;    // the second or null
  const float *weight, *bias;  // per feature; null stands for ones and for zeros
  void *out, *sum;             // in x's type, as `sum` of x + residual
  float *mean, *inverse;       // per row, or null where nobody reads them
  Type type;
  int64_t features;
  float eps;
  bool centered;  // LayerNorm; else RMSNorm, whose mean is zero
};

// Gradients of x, and sums of those of weight and bias over rows [begin, end), in order of the rows.
struct NormBackwardTask {
  const void *grad, *x;
  const float *mean, *inverse;  // as forward has found them; mean null where rows are not centered
  const float* weight;          // or null
  void* d_x;                    // or null
  float *d_weight, *d_bias;     // a block of rows' sums, `features` apart, each or null
  Type type;
  int64_t features, block;
};

}  // namespace tw
