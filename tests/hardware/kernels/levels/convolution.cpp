// Convolutions, dense and depthwise, and means over pixels.
#include <algorithm>

#include "conv.h"
#include "harness.h"

namespace levels {

using tw::Activation;
using tw::CHANNELS;
using tw::ConvTask;

struct Shape {
  int64_t channels, features, window, stride, padding;
  Activation activation = Activation::none;
  bool residual = false, scaled = false;
};

constexpr int64_t BATCH = 2, HEIGHT = 7, WIDTH = 9;

ConvTask task_of(const Shape& s, Type type) {
  ConvTask t{};
  t.type = type, t.activation = s.activation, t.height = HEIGHT, t.width = WIDTH, t.channels = s.channels;
  t.features = s.features, t.window_height = t.window_width = s.window, t.stride_y = t.stride_x = s.stride;
  t.padding_y = t.padding_x = s.padding;
  t.out_height = (HEIGHT + 2 * s.padding - s.window) / s.stride + 1;
  t.out_width = (WIDTH + 2 * s.padding - s.window) / s.stride + 1;
  return t;
}

// `pairs` says that weights are bfloat16.
std::vector<Written> dense(const Kernels& k, const Shape& s, Type type, bool pairs, bool planes) {
  Random random(s.channels + s.features);
  ConvTask t = task_of(s, type);
  const int64_t parts = type == Type::bf16 ? 1 : 2, inputs = s.window * s.window * s.channels;
  const int64_t blocks = t.blocks(), size = pairs ? t.steps() * parts * tw::PAIRED_DEPTH : inputs;
  const auto x = numbers(random, type, BATCH * HEIGHT * WIDTH * s.channels);
  const auto weight = numbers(random, pairs ? Type::bf16 : Type::f32, blocks * size * CHANNELS);
  const auto bias = random.reals(std::max(s.features, CHANNELS)), scale = random.reals(BATCH * s.channels);
  const int64_t pixels = BATCH * t.out_height * t.out_width;
  const auto more = numbers(random, type, pixels * s.features);
  Written out(type, pixels * s.features);
  t.x = x.data(), t.weight = weight.data(), t.bias = bias.data(), t.out = out.data(), t.planes = planes;
  if (s.residual) t.residual = more.data();
  if (s.scaled) t.scale = scale.data();
  if (pairs) k.convolve_pairs(t, 0, pixels, 0, blocks);
  else for (int64_t row = 0; row < BATCH * t.out_height; row++) k.convolve(t, row, 0, t.out_width, 0, blocks);
  return {out};
}

std::vector<Written> depthwise(const Kernels& k, const Shape& s, Type type) {
  Random random(s.channels + s.window);
  ConvTask t = task_of(s, type);
  const auto x = numbers(random, type, BATCH * HEIGHT * WIDTH * s.channels);
  const auto weight = random.reals(s.window * s.window * s.channels), bias = random.reals(s.channels);
  Written out(type, BATCH * t.out_height * t.out_width * s.channels);
  t.x = x.data(), t.weight = weight.data(), t.bias = bias.data(), t.out = out.data();
  for (int64_t row = 0; row < BATCH * t.out_height; row++) k.convolve_depthwise(t, row);
  Written sums(Type::f32, BATCH * HEIGHT * t.blocks() * CHANNELS), means(type, BATCH * s.channels);
  for (int64_t row = 0; row < BATCH * HEIGHT; row++)
    k.sum_pixels(t, row, (float*)sums.data() + row * t.blocks() * CHANNELS);
  t.out = means.data();
  for (int64_t image = 0; image < BATCH; image++) k.average(t, image, (float*)sums.data());
  return {out, sums, means};
}

std::vector<Case> convolution_cases() {
  std::vector<Case> all;
  const auto add = [&](std::string name, bool pairs, auto run) { all.push_back({name, pairs, run}); };
  const std::vector<Shape> shapes = {
      {16, 16, 1, 1, 0, Activation::relu},
      {20, 40, 1, 1, 0, Activation::silu, true, true},
      {3, 8, 3, 2, 1, Activation::hardswish},
      {32, 70, 3, 1, 1, Activation::gelu, true},
  };
  for (const Shape& s : shapes) {
    add("convolve", false, [=](const Kernels& k) { return dense(k, s, Type::f32, false, false); });
    for (const Type type : {Type::f32, Type::bf16, Type::f16})
      add("convolve_pairs", true, [=](const Kernels& k) { return dense(k, s, type, true, false); });
  }
  add("convolve planes", false, [=](const Kernels& k) { return dense(k, shapes[2], Type::f32, false, true); });
  for (const Type type : {Type::f32, Type::bf16, Type::f16})
    for (const int64_t window : {2, 3, 5, 7})
      for (const int64_t stride : {1, 2}) {
        const Shape s{37, 37, window, stride, window / 2, stride == 1 ? Activation::sigmoid : Activation::relu6};
        add("convolve_depthwise", false, [=](const Kernels& k) { return depthwise(k, s, type); });
      }
  return all;
}

}  // namespace levels
