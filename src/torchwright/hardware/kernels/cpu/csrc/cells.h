// LSTM and GRU layers, shared by the operators and every instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace tw {

// One layer in one direction. The gates of a unit are in torch's order: input, forget, cell, output of an LSTM; reset,
// update, new of a GRU. A block is sixteen units, the last one made up by zeros.
struct CellTask {
  const float* gates;             // what the inputs add: each step's rows, each of (gates, size)
  int64_t gate_step, gate_row;    // values between two steps, and between two rows
  const float* weight;            // (blocks, size, gates, 16)
  const float* bias;              // of a GRU's new gate, within what it resets: (blocks * 16,)
  const float* first;             // (rows, size): the output before the first step
  float* cell;                    // (rows, size): an LSTM's, before a step and after it
  float* out;
  int64_t out_step, out_row;
  int64_t size, steps;
  bool backwards;  // from the last step to the first

  int64_t place(int64_t step) const { return backwards ? steps - 1 - step : step; }
  const float* before(int64_t step, int64_t row) const {
    return step ? out + place(step - 1) * out_step + row * out_row : first + row * size;
  }
};

}  // namespace tw
