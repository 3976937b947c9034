// Convolutions of images whose channels lie side by side, shared by the operators and every instruction set.
#pragma once

#include <cstdint>

#include "encoder.h"
#include "kernels.h"

namespace tw {

constexpr int64_t CHANNELS = 16;      // a block: what one vector holds
constexpr int64_t PAIRED_DEPTH = 32;  // inputs of a tile of bfloat16

// out = activation(convolution + bias) + residual. Images are (batch, height, width, channels) without gaps, but for an
// input in planes.
//
// A dense weight is blocks of CHANNELS output features, each (inputs, CHANNELS), the inputs being those of a window, row
// after row. In bfloat16 it is steps of PAIRED_DEPTH inputs, each (parts, PAIRED_DEPTH / 2, CHANNELS, 2): two inputs of a
// feature lie side by side, zeros fill the last step, and what multiplies float32 has two parts, whose sum is the weight.
// Features that do not fill the last block are made up by those before them, so that it ends with the last one; where all
// are fewer than a block, by zeros. A depthwise weight is float32 (window_height, window_width, channels), of CHANNELS at
// least.
struct ConvTask {
  const void *x, *weight;
  const float* bias;  // features, CHANNELS at least
  const void* residual;  // of the output's shape and type, or null
  const float* scale;    // (batch, channels), by which a 1x1 layer's input is multiplied first; or null
  void* out;
  Type type;  // f32, bf16 or f16: of x, residual and out
  bool planes;  // x is float32 (batch, channels, height, width) of a dense layer, as pictures come
  Activation activation;
  int64_t height, width, channels, out_height, out_width, features;
  int64_t window_height, window_width, stride_y, stride_x, padding_y, padding_x;

  int64_t steps() const { return (window_height * window_width * channels + PAIRED_DEPTH - 1) / PAIRED_DEPTH; }
  // Whether an output's inputs are the pixel in its place.
  bool pointwise() const {
    return window_height * window_width == 1 && stride_y == 1 && stride_x == 1;
  }
  int64_t blocks() const { return (features + CHANNELS - 1) / CHANNELS; }
  int64_t first_feature(int64_t block) const {
    const int64_t last = features > CHANNELS ? features - CHANNELS : 0;
    return block * CHANNELS < last ? block * CHANNELS : last;
  }
  // Outputs of a row whose window lies within the image's width: [begin, end).
  int64_t inside_begin() const { return (padding_x + stride_x - 1) / stride_x; }
  int64_t inside_end() const {
    const int64_t room = width + padding_x - window_width;
    return room < 0 ? 0 : room / stride_x + 1;
  }
};

}  // namespace tw
