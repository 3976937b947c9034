// The operators of norms: for inference, and for training with what backward reads.
#include "norm.h"

namespace {

// Elements of a block of rows, whose gradients of weight and bias are summed in order before blocks are: sums do not
// depend on the number of threads. Enough for a task, and at least 64 rows, so that the blocks' sums are few.
constexpr int64_t BLOCK = 65536, BLOCK_ROWS = 64;

tw::NormTask norm_task(const Tensor& x, const optional<Tensor>& weight, const optional<Tensor>& bias, double eps,
                       const Tensor& out) {
  tw::NormTask task{};
  task.x = x.const_data_ptr(), task.type = float_type(x, "x"), task.features = x.size(-1);
  task.weight = floats(weight, task.features, "weight"), task.bias = floats(bias, task.features, "bias");
  task.out = out.mutable_data_ptr(), task.eps = float(eps);
  return task;
}

void run(const tw::NormTask& task, int64_t rows) {
  const auto& k = kernels();
  each_row(rows, task.features, [&](int64_t row) { k.norm(task, row); });
}

Tensor rms_norm(const Tensor& x_in, const Tensor& weight, double eps) {
  const Tensor x = x_in.contiguous();
  const int64_t rows = row_count(x);
  Tensor out = at::empty_like(x);
  run(norm_task(x, weight, {}, eps, out), rows);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x_in, const Tensor& residual_in, const Tensor& weight,
                                        double eps) {
  const Tensor x = x_in.contiguous(), residual = residual_in.contiguous();
  const int64_t rows = row_count(x);
  TORCH_CHECK_VALUE(residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type(),
                    "residual and x differ in shape or type");
  Tensor out = at::empty_like(x), total = at::empty_like(x);
  tw::NormTask task = norm_task(x, weight, {}, eps, out);
  task.residual = residual.const_data_ptr(), task.sum = total.mutable_data_ptr();
  run(task, rows);
  return {out, total};
}

std::tuple<Tensor, Tensor, Tensor> norm(const Tensor& x_in, const optional<Tensor>& weight,
                                        const optional<Tensor>& bias, double eps, bool centered) {
  const Tensor x = x_in.contiguous();
  TORCH_CHECK_VALUE(weight || !bias, "a norm with a bias has a weight too");
  const int64_t rows = row_count(x);
  const auto numbers = x.options().dtype(at::kFloat);
  Tensor out = at::empty_like(x), mean = at::empty({centered ? rows : 0}, numbers), inverse = at::empty({rows}, numbers);
  tw::NormTask task = norm_task(x, weight, bias, eps, out);
  task.centered = centered, task.inverse = inverse.mutable_data_ptr<float>();
  if (centered) task.mean = mean.mutable_data_ptr<float>();
  run(task, rows);
  return {out, mean, inverse};
}

// Σ of the blocks' sums, in order.
Tensor summed(const Tensor& parts) {
  const int64_t blocks = parts.size(0), features = parts.size(1);
  Tensor out = at::zeros({features}, parts.options());
  const float* from = parts.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  constexpr int64_t PART = 1024;  // features of a task: their sums stay in the first level of cache
  const int64_t pieces = up(features, PART) / PART;
  each_row(pieces, blocks * PART, [&](int64_t piece) {
    const int64_t end = std::min(features, (piece + 1) * PART);
    for (int64_t block = 0; block < blocks; block++)
      for (int64_t i = piece * PART; i < end; i++) to[i] += from[block * features + i];
  });
  return out;
}

// Gradients of x, weight and bias, those that are wanted; the others have no elements.
std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad_in, const Tensor& x_in, const Tensor& mean,
                                                 const Tensor& inverse, const optional<Tensor>& weight,
                                                 std::array<bool, 3> wanted) {
  const Tensor x = x_in.contiguous(), grad = grad_in.contiguous();
  const int64_t rows = row_count(x), features = x.size(-1);
  TORCH_CHECK_VALUE(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type(),
                    "grad and x differ in shape or type");
  TORCH_CHECK_VALUE(mean.numel() == 0 || mean.numel() == rows, "mean has ", mean.numel(), " values for ", rows, " rows");
  const int64_t block = std::max(BLOCK_ROWS, BLOCK / features), blocks = up(rows, block) / block;
  const auto numbers = x.options().dtype(at::kFloat);
  const Tensor d_x = wanted[0] ? at::empty_like(x) : at::empty({0}, x.options());
  const Tensor d_weight = at::empty({wanted[1] ? blocks : 0, features}, numbers);
  const Tensor d_bias = at::empty({wanted[2] ? blocks : 0, features}, numbers);
  tw::NormBackwardTask task{};
  task.grad = grad.const_data_ptr(), task.x = x.const_data_ptr(), task.type = float_type(x, "x");
  task.features = features, task.block = block;
  task.weight = floats(weight, features, "weight"), task.inverse = floats(inverse, rows, "inverse");
  if (mean.numel()) task.mean = floats(mean, rows, "mean");
  if (wanted[0]) task.d_x = d_x.mutable_data_ptr();
  if (wanted[1]) task.d_weight = d_weight.mutable_data_ptr<float>();
  if (wanted[2]) task.d_bias = d_bias.mutable_data_ptr<float>();
  const auto& k = kernels();
  each_row(blocks, 4 * block * features,
           [&](int64_t i) { k.norm_backward(task, i * block, std::min(rows, (i + 1) * block)); });
  const auto sums = [&](const Tensor& parts, bool asked) { return asked ? summed(parts) : at::empty({0}, numbers); };
  return {d_x, sums(d_weight, wanted[1]), sums(d_bias, wanted[2])};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centered) -> (Tensor, Tensor, Tensor)");
  m.def(
      "norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor inverse, Tensor? weight, bool[3] wanted) "
      "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(torchwright, CPU, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("norm", norm);
  m.impl("norm_backward", norm_backward);
}
