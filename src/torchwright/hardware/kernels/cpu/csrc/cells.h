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
  float* cell;                    // (rows, size): an LSTM's, before a step and after it
  // (2, rows, stride): the outputs of the step before, and of this one, in turns. In the results they may lie some whole
  // pages apart, where the first cache has too few places for them.
  float* states;
  int64_t state_row;
  float* out;
  int64_t out_step, out_row;
  int64_t size, steps, rows;
  bool backwards;  // from the last step to the first

  int64_t place(int64_t step) const { return backwards ? steps - 1 - step : step; }
  float* state(int64_t step, int64_t row) const { return states + (step % 2 * rows + row) * state_row; }
};

}  // namespace tw
