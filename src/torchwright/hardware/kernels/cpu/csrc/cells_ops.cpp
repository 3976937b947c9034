// LSTM and GRU layers as operators. ops.cpp takes this in, whose helpers it uses.
#include "cells.h"

namespace {

using CellStep = void (*)(const tw::CellTask&, int64_t, int64_t, int64_t, int64_t, int64_t);

// Products of a part of a step that is worth sharing with another thread, which takes some microseconds; and of one
// beside which that is little.
constexpr int64_t SHARED_PRODUCTS = 1 << 17, MANY_PRODUCTS = 1 << 20;

// All steps. Threads share the units of a step, so that each reads a part of the weights. Where a step is short for
// that and there are rows enough, they share these, each for all steps.
void run_cells(const tw::CellTask& task, int64_t rows, int64_t gates, CellStep step) {
  const int64_t blocks = up(task.size, 16) / 16, workers = threads();
  const int64_t products = rows * gates * task.size * task.size;
  const bool is_long = products / workers >= MANY_PRODUCTS;
  const int64_t by_rows = rows >= 2 * workers && !is_long ? workers : 1;
  const int64_t parts = std::min({workers, blocks, std::max<int64_t>(1, products / SHARED_PRODUCTS)});
  if (by_rows > 1 || parts == 1)
    return each(by_rows, [&](int64_t i) {
      for (int64_t s = 0; s < task.steps; s++)
        step(task, s, rows * i / by_rows, rows * (i + 1) / by_rows, 0, blocks);
    });
  for (int64_t s = 0; s < task.steps; s++)
    each(parts, [&](int64_t i) { step(task, s, 0, rows, blocks * i / parts, blocks * (i + 1) / parts); });
}

// The layer's outputs, laid out as its gates, and the last of them.
std::pair<Tensor, Tensor> cell_layer(tw::CellTask& task, const Tensor& gates_in, const Tensor& weight,
                                     const Tensor& first_in, bool batch_first, bool backwards, int64_t count,
                                     CellStep step) {
  const Tensor gates = gates_in.contiguous(), first = first_in.contiguous();
  TORCH_CHECK_VALUE(first.dim() == 2 && gates.dim() == 3 && gates.size(2) == count * first.size(1) && first.size(1),
                    "gates of shape ", gates.sizes(), " are not (steps, rows, ", count, " gates) of a state of shape ",
                    first.sizes());
  const int64_t rows = gates.size(batch_first ? 0 : 1), steps = gates.size(batch_first ? 1 : 0), size = first.size(1);
  TORCH_CHECK_VALUE(first.size(0) == rows, "a state of ", first.size(0), " rows is not that of ", rows);
  const Tensor out = at::empty({gates.size(0), gates.size(1), size}, gates.options());
  task.gates = floats(gates, gates.numel(), "gates"), floats(first, first.numel(), "state");
  task.weight = floats(weight, up(size, 16) * size * count, "weight");
  task.gate_step = (batch_first ? 1 : rows) * count * size, task.gate_row = (batch_first ? steps : 1) * count * size;
  task.out_step = (batch_first ? 1 : rows) * size, task.out_row = (batch_first ? steps : 1) * size;
  task.out = out.mutable_data_ptr<float>(), task.backwards = backwards;
  task.size = size, task.steps = steps, task.rows = rows;
  task.state_row = up(size, 16) + 16;  // a line more, so that rows of whole pages are no whole pages apart
  const Tensor states = at::empty({2, rows, task.state_row}, gates.options());
  task.states = states.mutable_data_ptr<float>();
  states[0].narrow(1, 0, size).copy_(first);
  if (rows && steps) run_cells(task, rows, count, step);
  return {out, states[steps % 2].narrow(1, 0, size).clone()};
}

std::tuple<Tensor, Tensor, Tensor> lstm_layer(const Tensor& gates, const Tensor& weight, const Tensor& first,
                                              const Tensor& cell_in, bool batch_first, bool backwards) {
  const Tensor cell = cell_in.clone(at::MemoryFormat::Contiguous);
  TORCH_CHECK_VALUE(cell.sizes() == first.sizes(), "a cell of shape ", cell.sizes(), " is not like its state, ",
                    first.sizes());
  tw::CellTask task{};
  task.cell = const_cast<float*>(floats(cell, cell.numel(), "cell"));
  auto [out, last] = cell_layer(task, gates, weight, first, batch_first, backwards, 4, kernels().lstm_step);
  return {out, last, cell};
}

std::tuple<Tensor, Tensor> gru_layer(const Tensor& gates, const Tensor& weight, const Tensor& bias, const Tensor& first,
                                     bool batch_first, bool backwards) {
  tw::CellTask task{};
  task.bias = floats(bias, first.dim() == 2 ? up(first.size(1), 16) : 0, "bias");
  auto [out, last] = cell_layer(task, gates, weight, first, batch_first, backwards, 3, kernels().gru_step);
  return {out, last};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.def(
      "lstm_layer(Tensor gates, Tensor weight, Tensor state, Tensor cell, bool batch_first, bool backwards) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "gru_layer(Tensor gates, Tensor weight, Tensor bias, Tensor state, bool batch_first, bool backwards) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(torchwright, CPU, m) {
  m.impl("lstm_layer", lstm_layer);
  m.impl("gru_layer", gru_layer);
}
