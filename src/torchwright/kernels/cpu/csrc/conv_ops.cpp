// Convolutions as operators; ops.cpp takes this in, whose helpers it uses.
#include "conv.h"

namespace {

constexpr int64_t PIECE = 1 << 18;  // products that are worth a task of their own

Tensor side_by_side(const Tensor& x, const char* what) {
  TORCH_CHECK_VALUE(x.dim() == 4, what, " of shape ", x.sizes(), " is not (batch, channels, height, width)");
  return x.contiguous(at::MemoryFormat::ChannelsLast);
}

int64_t outputs_along(int64_t size, int64_t window, int64_t stride, int64_t padding) {
  TORCH_CHECK_VALUE(window > 0 && stride > 0 && padding >= 0 && padding < window, "a window of ", window, ", a stride of ",
                    stride, " and a padding of ", padding, "; windows wider than their padding are wanted");
  TORCH_CHECK_VALUE(size + 2 * padding >= window, "an image of ", size, " and a padding of ", padding,
                    " are smaller than the window of ", window);
  return (size + 2 * padding - window) / stride + 1;
}

// What both kinds check and fill in; `x` lies as the kernels read it.
tw::ConvTask conv_task(const Tensor& x, const Tensor& bias, at::IntArrayRef window, at::IntArrayRef stride,
                       at::IntArrayRef padding, int64_t features, c10::string_view activation) {
  TORCH_CHECK_VALUE(window.size() == 2 && stride.size() == 2 && padding.size() == 2,
                    "window, stride and padding are two numbers each");
  TORCH_CHECK_VALUE(features > 0 && features < LONGEST, "features is ", features, "; 1 to ", LONGEST, " is wanted");
  tw::ConvTask task{};
  task.type = float_type(x, "x");
  task.x = x.const_data_ptr();
  task.channels = x.size(1), task.height = x.size(2), task.width = x.size(3);
  task.window_height = window[0], task.window_width = window[1];
  task.stride_y = stride[0], task.stride_x = stride[1];
  task.padding_y = padding[0], task.padding_x = padding[1];
  task.out_height = outputs_along(task.height, window[0], stride[0], padding[0]);
  task.out_width = outputs_along(task.width, window[1], stride[1], padding[1]);
  task.features = features;
  task.bias = floats(bias, std::max(features, tw::CHANNELS), "bias");
  task.activation = activation_of(activation);
  return task;
}

Tensor conv_out(const Tensor& x, const tw::ConvTask& task) {
  return at::empty({x.size(0), task.out_height, task.out_width, task.features}, x.options()).permute({0, 3, 1, 2});
}

Tensor conv_dense(const Tensor& x_in, const Tensor& weight, const Tensor& bias, at::IntArrayRef window,
                  at::IntArrayRef stride, at::IntArrayRef padding, int64_t features, c10::string_view activation,
                  const optional<Tensor>& residual_in) {
  const Tensor x = side_by_side(x_in, "x");
  tw::ConvTask task = conv_task(x, bias, window, stride, padding, features, activation);
  const int64_t products = task.channels * task.window_height * task.window_width;  // of an output
  TORCH_CHECK_VALUE(weight.is_contiguous() && weight.scalar_type() == x.scalar_type() &&
                        weight.numel() == task.blocks() * products * tw::CHANNELS,
                    "the packed weight has ", weight.numel(), " values of ", weight.scalar_type(), "; ", features,
                    " features of ", products, " inputs take ", task.blocks() * products * tw::CHANNELS, " of ",
                    x.scalar_type());
  TORCH_CHECK_VALUE(task.type == Type::f32 || task.channels % 2 == 0, "x has ", task.channels,
                    " channels; an even number is wanted in bfloat16");
  task.weight = weight.const_data_ptr();
  const Tensor out = conv_out(x, task);
  Tensor residual;
  if (residual_in) {
    TORCH_CHECK_VALUE(residual_in->sizes() == out.sizes() && residual_in->scalar_type() == x.scalar_type(),
                      "residual is ", residual_in->scalar_type(), residual_in->sizes(), "; the output is ",
                      x.scalar_type(), out.sizes());
    residual = side_by_side(*residual_in, "residual");
    task.residual = residual.const_data_ptr();
  }
  if (!out.numel()) return out;
  task.out = out.mutable_data_ptr();
  int64_t rows = x.size(0) * task.out_height;
  if (products == task.channels && task.stride_y == 1 && task.stride_x == 1) {
    // Pixels are all alike then: one row of them.
    task.width = task.out_width = rows * task.out_width;
    task.height = task.out_height = rows = 1;
  }
  // Threads share pixels where there are enough for full tiles, else blocks of features.
  constexpr int64_t TILE = 48;
  const int64_t all = rows * task.out_width * task.features * products, wanted = std::min(PIECES * threads(), up(all, PIECE) / PIECE);
  const int64_t spans = std::clamp<int64_t>(wanted / rows, 1, up(task.out_width, TILE) / TILE);
  const int64_t parts = std::clamp<int64_t>(wanted / (rows * spans), 1, up(task.blocks(), 4) / 4);
  const int64_t together = std::max<int64_t>(1, rows / std::max<int64_t>(1, wanted));  // rows of a task
  const auto& k = kernels();
  const int64_t groups = up(rows, together) / together;
  each(groups * spans * parts, [&](int64_t i) {
    const int64_t part = i % parts, span = i / parts % spans, group = i / parts / spans;
    for (int64_t row = group * together; row < std::min(rows, (group + 1) * together); row++)
      k.convolve(task, row, task.out_width * span / spans, task.out_width * (span + 1) / spans,
                 task.blocks() * part / parts, task.blocks() * (part + 1) / parts);
  });
  return out;
}

Tensor conv_depthwise(const Tensor& x_in, const Tensor& weight, const Tensor& bias, at::IntArrayRef window,
                      at::IntArrayRef stride, at::IntArrayRef padding, c10::string_view activation) {
  const Tensor x = side_by_side(x_in, "x");
  TORCH_CHECK_VALUE(x.size(1) >= tw::CHANNELS, "x has ", x.size(1), " channels; ", tw::CHANNELS, " at least are wanted");
  tw::ConvTask task = conv_task(x, bias, window, stride, padding, x.size(1), activation);
  task.weight = floats(weight, task.channels * task.window_height * task.window_width, "weight");
  const Tensor out = conv_out(x, task);
  if (!out.numel()) return out;
  task.out = out.mutable_data_ptr();
  const auto& k = kernels();
  each_row(x.size(0) * task.out_height, task.out_width * task.channels * task.window_height,
           [&](int64_t row) { k.convolve_depthwise(task, row); });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.def(
      "conv_dense(Tensor x, Tensor weight, Tensor bias, int[2] window, int[2] stride, int[2] padding, int features, "
      "str activation, Tensor? residual) -> Tensor");
  m.def(
      "conv_depthwise(Tensor x, Tensor weight, Tensor bias, int[2] window, int[2] stride, int[2] padding, "
      "str activation) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchwright, CPU, m) {
  m.impl("conv_dense", conv_dense);
  m.impl("conv_depthwise", conv_depthwise);
}
