// Convolutions over images whose channels lie side by side.
//
// The values that a row of a window covers are then side by side, too, and a dense convolution is a matrix product over
// them for each row of the window: 1x1 is one product. Sums are float32, in one order for every output, whatever tile
// it fell into. Dense weights in bfloat16 are `conv_pairs.cpp`'s.
#include <algorithm>

#include "conv.h"
#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::Activation;
using tw::CHANNELS;
using tw::ConvTask;

static_assert(LANES == CHANNELS);

// Pixels that share the weights which a tile loads, for so many blocks of features: what the registers hold.
#if defined(__AVX512F__)
constexpr int MOST_BLOCKS = 4;
constexpr int pixels_with(int blocks) { return blocks == 4 ? 6 : blocks == 3 ? 8 : 12; }
#else
constexpr int MOST_BLOCKS = 1;
constexpr int pixels_with(int) { return 4; }
#endif
constexpr int FEW_PIXELS = 4;

// Calls `run` with a number of the images' type.
template <class Run>
void with_type(Type type, const Run& run) {
  if (type == Type::f32) run(float{});
  else if (type == Type::f16) run(Half{});
  else run(uint16_t{});
}

// Out of line: what calls it has many shapes.
__attribute__((noinline)) void activate_all(Activation which, F* sums, int count) {
  with_activation(which, [&](auto a) {
    for (int i = 0; i < count; i++) sums[i] = activated<a()>(sums[i]);
  });
}

template <Activation A, int N>
inline void activate_here(F (&sums)[N]) {
  for (int i = 0; i < N; i++) sums[i] = activated<A>(sums[i]);
}

// What takes a few instructions is done in the registers, and the rest on a copy: sums whose address is known elsewhere
// would be written to memory after every product.
template <int N>
inline void activate_sums(Activation which, F (&sums)[N]) {
  if (which == Activation::none) return;
  if (which == Activation::relu) return activate_here<Activation::relu>(sums);
  if (which == Activation::relu6) return activate_here<Activation::relu6>(sums);
  if (which == Activation::hardswish) return activate_here<Activation::hardswish>(sums);
#if defined(__AVX512F__)
  if (which == Activation::silu) return activate_here<Activation::silu>(sums);
#endif
  F copy[N];
  for (int i = 0; i < N; i++) copy[i] = sums[i];
  activate_all(which, copy, N);
  for (int i = 0; i < N; i++) sums[i] = copy[i];
}

class Dense {
 public:
  Dense(const ConvTask& t, int64_t row)
      : t(t),
        image((const float*)t.x + row / t.out_height * t.height * t.width * t.channels),
        scale(t.scale ? t.scale + row / t.out_height * t.channels : nullptr),
        top(row % t.out_height * t.stride_y - t.padding_y),
        first(row * t.out_width),
        line(t.window_width * t.channels),
        block_size(t.window_height * line * CHANNELS) {}

  template <int NB>
  void run(int64_t begin, int64_t end, int64_t block) const {
    const int64_t left = std::clamp(t.inside_begin(), begin, end), right = std::clamp(t.inside_end(), left, end);
    for (int64_t x = begin; x < left; x++) tile<1, NB>(x, block);
    inside<pixels_with(NB), NB>(left, right, block);
    for (int64_t x = right; x < end; x++) tile<1, NB>(x, block);
  }

 private:
  // The last tile of several may overlap the one before.
  template <int MR, int NB>
  void inside(int64_t begin, int64_t end, int64_t block) const {
    if (end - begin >= MR) {
      for (int64_t x = begin; x < end; x += MR) tile<MR, NB>(std::min(x, end - MR), block);
    } else if constexpr (MR > FEW_PIXELS) {
      inside<FEW_PIXELS, NB>(begin, end, block);
    } else {
      for (int64_t x = begin; x < end; x++) tile<1, NB>(x, block);
    }
  }

  // MR outputs of a row from x on, by NB blocks; with one of them the window may leave the image.
  template <int MR, int NB>
  void tile(int64_t x, int64_t block) const {
    F sum[MR * NB];
    for (int b = 0; b < NB; b++) {
      const F bias = load<F>(t.bias + t.first_feature(block + b));
      for (int r = 0; r < MR; r++) sum[r * NB + b] = bias;
    }
    const int64_t edge = x * t.stride_x - t.padding_x;
    const int64_t from = std::max<int64_t>(0, -edge), to = std::min(t.window_width, t.width - edge);
    for (int64_t y = std::max<int64_t>(0, -top); y < std::min(t.window_height, t.height - top); y++) {
      const int64_t pixel = (top + y) * t.width + edge + from;
      const float* values = image + pixel * (t.planes ? 1 : t.channels);
      const float* weight = (const float*)t.weight + block * block_size + (y * line + from * t.channels) * CHANNELS;
      if (t.planes) add_planes<MR, NB>(values, weight, to - from, sum);
      else if (scale) add<MR, NB, true>(values, weight, (to - from) * t.channels, sum);
      else add<MR, NB, false>(values, weight, (to - from) * t.channels, sum);
    }
    activate_sums(t.activation, sum);
    const int64_t count = std::min(CHANNELS, t.features);
    for (int r = 0; r < MR; r++)
      for (int b = 0; b < NB; b++) {
        const int64_t at = (first + x + r) * t.features + t.first_feature(block + b);
        if (t.residual) sum[r * NB + b] = sum[r * NB + b] + load_some((const float*)t.residual + at, count);
        put((float*)t.out + at, sum[r * NB + b], count);
      }
  }

  // An input's scale multiplies its weights, which many pixels share.
  template <int MR, int NB, bool SCALED>
  void add(const float* x, const float* weight, int64_t count, F (&sum)[MR * NB]) const {
    const int64_t step = t.stride_x * t.channels;
    for (int64_t k = 0; k < count; k++, weight += CHANNELS) {
      F w[NB];
      for (int b = 0; b < NB; b++) w[b] = load<F>(weight + b * block_size);
      if constexpr (SCALED)
        for (int b = 0; b < NB; b++) w[b] = w[b] * splat(scale[k]);
      for (int r = 0; r < MR; r++) {
        const F value = splat(x[r * step + k]);
        for (int b = 0; b < NB; b++) sum[r * NB + b] = fma(value, w[b], sum[r * NB + b]);
      }
    }
  }

  // The same of a channel after another of each pixel, in the order in which they would lie side by side.
  template <int MR, int NB>
  void add_planes(const float* x, const float* weight, int64_t pixels, F (&sum)[MR * NB]) const {
    const int64_t plane = t.height * t.width;
    for (int64_t i = 0; i < pixels; i++)
      for (int64_t c = 0; c < t.channels; c++, weight += CHANNELS) {
        F w[NB];
        for (int b = 0; b < NB; b++) w[b] = load<F>(weight + b * block_size);
        for (int r = 0; r < MR; r++) {
          const F value = splat(x[c * plane + i + r * t.stride_x]);
          for (int b = 0; b < NB; b++) sum[r * NB + b] = fma(value, w[b], sum[r * NB + b]);
        }
      }
  }

  const ConvTask& t;
  const float *image, *scale;
  const int64_t top;    // of the window's rows, the first's place in the image
  const int64_t first;  // pixel of the output's row
  const int64_t line, block_size;
};

template <int NB>
void dense_blocks(const Dense& dense, int64_t x_begin, int64_t x_end, int64_t block, int64_t end) {
  for (; block + NB <= end; block += NB) dense.run<NB>(x_begin, x_end, block);
  if constexpr (NB > 1) {
    if (block < end) dense_blocks<NB - 1>(dense, x_begin, x_end, block, end);
  }
}

// Outputs [x_begin, x_end) of a row of the output, counted over all images, and some blocks of features.
void convolve(const ConvTask& t, int64_t row, int64_t x_begin, int64_t x_end, int64_t block_begin, int64_t block_end) {
  dense_blocks<MOST_BLOCKS>(Dense(t, row), x_begin, x_end, block_begin, block_end);
}

// One row of a depthwise convolution's output. Outputs side by side share what they read, where the window's width and
// stride are WIDTH and STRIDE.
template <class T, int WIDTH, int STRIDE>
class Depthwise {
 public:
  Depthwise(const ConvTask& t, int64_t row)
      : t(t),
        image((const T*)t.x + row / t.out_height * t.height * t.width * t.channels),
        out((T*)t.out + row * t.out_width * t.channels),
        top(row % t.out_height * t.stride_y - t.padding_y) {}

  void run() const {
    for (int64_t block = 0; block < t.blocks(); block++) {
      const int64_t c = t.first_feature(block);
      if (WIDTH > 0 && t.out_width >= TOGETHER) {
        // The last of several may overlap those before.
        for (int64_t x = 0; x < t.out_width; x += TOGETHER) several(std::min(x, t.out_width - TOGETHER), c);
      } else {
        for (int64_t x = 0; x < t.out_width; x++) one(x, c);
      }
    }
  }

 private:
  static constexpr int TOGETHER = 4, COLUMNS = WIDTH ? (TOGETHER - 1) * STRIDE + WIDTH : 0;

  inline void several(int64_t x, int64_t c) const {
    const int64_t edge = x * STRIDE - t.padding_x;
    if (edge >= 0 && edge + COLUMNS <= t.width) several<true>(x, edge, c);
    else several<false>(x, edge, c);
  }

  // INSIDE says that all columns lie in the image.
  template <bool INSIDE>
  inline void several(int64_t x, int64_t edge, int64_t c) const {
    F sum[TOGETHER];
    for (int n = 0; n < TOGETHER; n++) sum[n] = load<F>(t.bias + c);
    for (int64_t y = std::max<int64_t>(0, -top); y < std::min(t.window_height, t.height - top); y++) {
      const T* from = image + ((top + y) * t.width + edge) * t.channels + c;
      const float* weight = (const float*)t.weight + y * WIDTH * t.channels + c;
      F w[WIDTH + 1];
      for (int i = 0; i < WIDTH; i++) w[i] = load<F>(weight + i * t.channels);
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++) {
        if (!INSIDE && (edge + j < 0 || edge + j >= t.width)) continue;
        const F value = load_f32(from + j * t.channels);
#pragma GCC unroll 4
        for (int n = 0; n < TOGETHER; n++)
          if (j >= n * STRIDE && j < n * STRIDE + WIDTH) sum[n] = fma(value, w[j - n * STRIDE], sum[n]);
      }
    }
    activate_sums(t.activation, sum);
    for (int n = 0; n < TOGETHER; n++) store_f32(out + (x + n) * t.channels + c, sum[n]);
  }

  // An output of a window of any width and stride.
  void one(int64_t x, int64_t c) const {
    F sum[1] = {load<F>(t.bias + c)};
    const int64_t edge = x * t.stride_x - t.padding_x;
    for (int64_t y = std::max<int64_t>(0, -top); y < std::min(t.window_height, t.height - top); y++)
      for (int64_t i = std::max<int64_t>(0, -edge); i < std::min(t.window_width, t.width - edge); i++)
        sum[0] = fma(load_f32(image + ((top + y) * t.width + edge + i) * t.channels + c),
                     load<F>((const float*)t.weight + (y * t.window_width + i) * t.channels + c), sum[0]);
    activate_sums(t.activation, sum);
    store_f32(out + x * t.channels + c, sum[0]);
  }

  const ConvTask& t;
  const T* image;
  T* out;
  const int64_t top;
};

template <class T>
void depthwise_row(const ConvTask& t, int64_t row) {
  const int64_t width = t.window_width, stride = t.stride_x;
  if (width == 3 && stride == 1) return Depthwise<T, 3, 1>(t, row).run();
  if (width == 3 && stride == 2) return Depthwise<T, 3, 2>(t, row).run();
  if (width == 5 && stride == 1) return Depthwise<T, 5, 1>(t, row).run();
  if (width == 5 && stride == 2) return Depthwise<T, 5, 2>(t, row).run();
  if (width == 7 && stride == 1) return Depthwise<T, 7, 1>(t, row).run();
  Depthwise<T, 0, 0>(t, row).run();
}

void convolve_depthwise(const ConvTask& t, int64_t row) {
  with_type(t.type, [&](auto number) { depthwise_row<decltype(number)>(t, row); });
}

// Sums over the pixels of a row of the input, every channel's in one order, on to whole blocks.
template <class T>
void sum_row(const ConvTask& t, int64_t row, float* to) {
  constexpr int64_t TOGETHER = 4;
  const T* from = (const T*)t.x + row * t.width * t.channels;
  for (int64_t block = 0; block < t.blocks(); block += TOGETHER) {
    const int64_t count = std::min(TOGETHER, t.blocks() - block);
    F sum[TOGETHER] = {};
    for (int64_t x = 0; x < t.width; x++)
      for (int64_t b = 0; b < count; b++) {
        const int64_t c = (block + b) * CHANNELS;
        sum[b] = sum[b] + load_some(from + x * t.channels + c, t.channels - c);
      }
    for (int64_t b = 0; b < count; b++) store(to + (block + b) * CHANNELS, sum[b]);
  }
}

void sum_pixels(const ConvTask& t, int64_t row, float* to) {
  with_type(t.type, [&](auto number) { sum_row<decltype(number)>(t, row, to); });
}

// Means over all pixels of an image: the sums of its rows, added up.
template <class T>
void average_rows(const ConvTask& t, int64_t image, const float* sums) {
  const F share = splat(1.0f / float(t.height * t.width));
  T* out = (T*)t.out + image * t.channels;
  for (int64_t c = 0; c < t.channels; c += CHANNELS) {
    F total{};
    for (int64_t y = 0; y < t.height; y++) total = total + load<F>(sums + y * t.blocks() * CHANNELS + c);
    put(out + c, total * share, t.channels - c);
  }
}

void average(const ConvTask& t, int64_t image, const float* sums) {
  sums += image * t.height * t.blocks() * CHANNELS;
  with_type(t.type, [&](auto number) { average_rows<decltype(number)>(t, image, sums); });
}

}  // namespace TW_ISA
