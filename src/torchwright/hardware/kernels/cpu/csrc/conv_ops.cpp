// Convolutions as operators; ops.cpp takes this in, whose helpers it uses.
#include "conv.h"

namespace {

constexpr int64_t PIECE = 1 << 18;  // products that are worth a task of their own

Type image_type(const Tensor& x) { return x.scalar_type() == at::kHalf ? Type::f16 : float_type(x, "x"); }

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

// Whether a dense layer reads x as it is: its planes are not worth being put side by side for few channels.
bool in_planes(const Tensor& x, const Tensor& weight) {
  return x.dim() == 4 && x.size(1) < tw::CHANNELS && x.scalar_type() == at::kFloat && x.is_contiguous() &&
         weight.scalar_type() == at::kFloat;
}

// What both kinds check and fill in; `x` lies as the kernels read it.
tw::ConvTask conv_task(const Tensor& x, const Tensor& bias, at::IntArrayRef window, at::IntArrayRef stride,
                       at::IntArrayRef padding, int64_t features, c10::string_view activation) {
  TORCH_CHECK_VALUE(window.size() == 2 && stride.size() == 2 && padding.size() == 2,
                    "window, stride and padding are two numbers each");
  TORCH_CHECK_VALUE(features > 0 && features < LONGEST, "features is ", features, "; 1 to ", LONGEST, " is wanted");
  tw::ConvTask task{};
  task.type = image_type(x);
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

int64_t inputs_of(const tw::ConvTask& task) { return task.channels * task.window_height * task.window_width; }

// Tasks into which a layer's work is worth being cut.
int64_t pieces_of(int64_t pixels, const tw::ConvTask& task) {
  return std::min(PIECES * threads(), up(pixels * task.features * inputs_of(task), PIECE) / PIECE);
}

Tensor conv_out(const Tensor& x, const tw::ConvTask& task) {
  return at::empty({x.size(0), task.out_height, task.out_width, task.features}, x.options()).permute({0, 3, 1, 2});
}

// Float32 weights: rows of pixels, in spans, by blocks of features.
void share_rows(tw::ConvTask task, int64_t batch) {
  int64_t rows = batch * task.out_height;
  if (task.pointwise()) {
    // Pixels are all alike then, those of an image at least: one row of them.
    rows = task.scale || task.planes ? batch : 1;
    task.width = task.out_width = batch * task.height * task.width / rows;
    task.height = task.out_height = 1;
  }
  // Threads share pixels where there are enough for full tiles, as many each, else blocks of features.
  constexpr int64_t TILE = 24, LEAST = 2 * TILE;
  const int64_t wanted = pieces_of(rows * task.out_width, task);
  int64_t spans = std::clamp<int64_t>(wanted / rows, 1, up(task.out_width, LEAST) / LEAST);
  if (spans > threads()) spans -= spans % threads();
  const int64_t parts = std::clamp<int64_t>(wanted / (rows * spans), 1, up(task.blocks(), 4) / 4);
  const int64_t together = std::max<int64_t>(1, rows / std::max<int64_t>(1, wanted));  // rows of a task
  const auto& k = kernels();
  const int64_t groups = up(rows, together) / together;
  const auto start = [&](int64_t span) {
    return span == spans ? task.out_width : (task.out_width * span / spans + TILE / 2) / TILE * TILE;
  };
  each(groups * spans * parts, [&](int64_t i) {
    const int64_t part = i % parts, span = i / parts % spans, group = i / parts / spans;
    for (int64_t row = group * together; row < std::min(rows, (group + 1) * together); row++)
      k.convolve(task, row, start(span), start(span + 1), task.blocks() * part / parts,
                 task.blocks() * (part + 1) / parts);
  });
}

// Weights in bfloat16: as many pixels together as have their inputs and outputs in the second level of cache, by blocks
// of features.
void share_pixels(const tw::ConvTask& task, int64_t batch) {
  constexpr int64_t INPUTS = 1 << 18, OUTPUTS = 1 << 16, TILES = 32;
  const int64_t pixels = batch * task.out_height * task.out_width, wanted = pieces_of(pixels, task);
  const int64_t most = std::min(INPUTS / (task.steps() * tw::PAIRED_DEPTH), OUTPUTS / task.features);
  const int64_t held = std::max(TILES, most / TILES * TILES);
  const int64_t spans = std::max(up(pixels, held) / held, std::min(wanted, up(pixels, TILES) / TILES));
  const int64_t parts = std::clamp<int64_t>(wanted / spans, 1, up(task.blocks(), 4) / 4);
  const auto& k = kernels();
  each(spans * parts, [&](int64_t i) {
    const int64_t part = i % parts, span = i / parts;
    k.convolve_pairs(task, pixels * span / spans, pixels * (span + 1) / spans, task.blocks() * part / parts,
                     task.blocks() * (part + 1) / parts);
  });
}

Tensor conv_dense(const Tensor& x_in, const Tensor& weight, const Tensor& bias, at::IntArrayRef window,
                  at::IntArrayRef stride, at::IntArrayRef padding, int64_t features, c10::string_view activation,
                  const optional<Tensor>& residual_in, const optional<Tensor>& scale_in) {
  const bool planes = in_planes(x_in, weight) && !scale_in;
  const Tensor x = planes ? x_in : side_by_side(x_in, "x");
  tw::ConvTask task = conv_task(x, bias, window, stride, padding, features, activation);
  task.planes = planes;
  const bool paired = weight.scalar_type() == at::kBFloat16;
  TORCH_CHECK_TYPE(paired || (task.type == Type::f32 && weight.scalar_type() == at::kFloat), "the packed weight is ",
                   weight.scalar_type(), " and x ", x.scalar_type(), "; float32 both, or bfloat16 weights are wanted");
  const int64_t inputs = paired ? task.steps() * tw::PAIRED_DEPTH * (task.type == Type::bf16 ? 1 : 2) : inputs_of(task);
  TORCH_CHECK_VALUE(weight.is_contiguous() && weight.numel() == task.blocks() * inputs * tw::CHANNELS,
                    "the packed weight has ", weight.numel(), " values of ", weight.scalar_type(), "; ", features,
                    " features of ", inputs_of(task), " inputs take ", task.blocks() * inputs * tw::CHANNELS);
  task.weight = weight.const_data_ptr();
  TORCH_CHECK_VALUE(!scale_in || task.pointwise(), "inputs are scaled in 1x1 windows of stride 1 only");
  const optional<Tensor> scale = scale_in ? optional<Tensor>(scale_in->contiguous()) : std::nullopt;
  task.scale = floats(scale, x.size(0) * task.channels, "scale");
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
  if (paired) share_pixels(task, x.size(0));
  else share_rows(task, x.size(0));
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

Tensor image_mean(const Tensor& x_in) {
  const Tensor x = side_by_side(x_in, "x");
  TORCH_CHECK_VALUE(x.size(2) > 0 && x.size(3) > 0, "an image of ", x.sizes(), " has no pixel");
  tw::ConvTask task{};
  task.type = image_type(x);
  task.x = x.const_data_ptr();
  task.channels = task.features = x.size(1), task.height = x.size(2), task.width = x.size(3);
  const Tensor out = at::empty({x.size(0), x.size(1), 1, 1}, x.options());
  if (!out.numel()) return out;
  task.out = out.mutable_data_ptr();
  // Rows are shared as those of the layer before were; a channel's sum is in one order.
  const int64_t rows = x.size(0) * task.height, width = task.blocks() * tw::CHANNELS;
  const Tensor sums = at::empty({rows, width}, x.options().dtype(at::kFloat));
  float* to = sums.mutable_data_ptr<float>();
  const auto& k = kernels();
  each_row(rows, task.width * task.channels, [&](int64_t row) { k.sum_pixels(task, row, to + row * width); });
  each_row(x.size(0), task.height * width, [&](int64_t image) { k.average(task, image, to); });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.def(
      "conv_dense(Tensor x, Tensor weight, Tensor bias, int[2] window, int[2] stride, int[2] padding, int features, "
      "str activation, Tensor? residual, Tensor? scale=None) -> Tensor");
  m.def(
      "conv_depthwise(Tensor x, Tensor weight, Tensor bias, int[2] window, int[2] stride, int[2] padding, "
      "str activation) -> Tensor");
  m.def("image_mean(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchwright, CPU, m) {
  m.impl("conv_dense", conv_dense);
  m.impl("conv_depthwise", conv_depthwise);
  m.impl("image_mean", image_mean);
}
