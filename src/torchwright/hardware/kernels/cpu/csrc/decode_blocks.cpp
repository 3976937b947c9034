// The program's larger operations: linear layers, attention, recurrences and experts. ops.cpp takes this in.
namespace {

// A layer that was added, of these sizes.
const Packed& DecodePlan::layer(int64_t which, int64_t width, int64_t features) const {
  TORCH_CHECK_INDEX(which >= 0 && which < int64_t(linears.size()), "there is no linear layer ", which);
  const Packed& found = linears[which];
  TORCH_CHECK_VALUE(found.width == width && found.task.features == features, "a linear layer of ", found.width, " to ",
                    found.task.features, " features is where one of ", width, " to ", features, " is wanted");
  return found;
}

// `place` is that of adapters, or negative.
void DecodePlan::linear(int64_t which, const Ints& from_cells, const Ints& to_cells, int64_t place) {
  const Cells from = dense(from_cells, "a linear layer's input"), to = dense(to_cells, "a linear layer's output");
  layer(which, from.width, to.width);
  push(
      [=, this](const Step& now) {
        ::multiply(linears[which], cell(now, from), type, now.rows, cell(now, to), now.own, about_zero, nothing_more);
        if (now.adapted && place >= 0)
          now.adapted->add(place, cell(now, to), cell(now, from), now.rows, from.width, to.width);
      },
      [=, this](const Step& now) { return Room(linears[which], now.rows).bytes; });
}

// Each head of a row by a weight of its own: their numbers begin `from_step` and `to_step` apart, and the last head's end
// with the row.
void DecodePlan::heads(const Tensor& weight, int64_t features, const Ints& from_cells, int64_t from_step,
                       const Ints& to_cells, int64_t to_step) {
  const Cells from = cells(from_cells), to = cells(to_cells);
  const int64_t heads = weight.size(0), width = from.width - (heads - 1) * from_step, bytes = weight.size(1);
  TORCH_CHECK_VALUE(width > 0 && width <= from_step && features <= to_step && (heads - 1) * to_step + features <= to.width,
                    heads, " heads, ", from_step, " and ", to_step, " numbers apart, do not fit rows of ", from.width,
                    " and ", to.width);
  const Packed first = packed_head(weight, width, features);
  keep(weight);
  push(
      [=, this](const Step& now) {
        multiply_heads(first, heads, bytes, type, now.rows,
                       {cell(now, from), from.stride * element, from_step * element},
                       {cell(now, to), to.stride * element, to_step * element}, now.own);
      },
      [=](const Step& now) { return heads * Room(first, now.rows).bytes; });
}

Pages DecodePlan::pages(const Tensor& k, const Tensor& v, const optional<Tensor>& k_scale,
                        const optional<Tensor>& v_scale, int64_t& count) {
  const Pages found(k, v, k_scale, v_scale);
  TORCH_CHECK_VALUE(count < 0 || count == found.count, "a layer of ", found.count, " pages does not fit those of ",
                    count, " before it");
  count = found.count;
  keep(k), keep(v), keep(k_scale), keep(v_scale);
  return found;
}

// Norms and turns queries and, where the layer `keeps` them, keys, which go into its pages with the values.
void DecodePlan::store(const Ints& from_cells, const Ints& q_cells, const Tensor& k, const Tensor& v,
                       const optional<Tensor>& k_scale, const optional<Tensor>& v_scale, bool keeps,
                       const optional<Tensor>& q_norm, const optional<Tensor>& k_norm, double eps, int64_t turn) {
  const Cells from = dense(from_cells, "query, key and value"), q = dense(q_cells, "queries");
  const Pages own = pages(k, v, k_scale, v_scale, page_count);
  const int64_t size = own.head_size, kv_heads = keeps ? own.heads : 0;
  TORCH_CHECK_VALUE(turn >= 0 && q.width % (size * own.heads) == 0 && from.width == q.width + 2 * kv_heads * size,
                    "rows of ", from.width, " numbers for queries of ", q.width, " do not fit pages of ", own.heads,
                    " heads of ", size);
  tw::RopeTask task{};
  own.into(task);
  task.type = type;
  task.heads = q.width / size, task.kv_heads = kv_heads;
  task.q_norm = floats(q_norm, size, "q_norm"), task.k_norm = floats(k_norm, size, "k_norm");
  task.eps = float(eps);
  keep(q_norm), keep(k_norm);
  turned.push_back({turn, size});
  push([=, this](const Step& now) {
    tw::RopeTask here = task;
    const tw::RopeTask& by = now.turns[turn];
    here.cos = by.cos, here.sin = by.sin, here.rotated = by.rotated;
    here.positions = by.positions, here.slots = by.slots;
    here.qkv = cell(now, from), here.q = cell(now, q);
    rope_rows(here, now.rows);
  });
}

int64_t DecodePlan::kind(const Kind& wanted) {
  const int64_t found = std::find(kinds.begin(), kinds.end(), wanted) - kinds.begin();
  if (found == int64_t(kinds.size())) kinds.push_back(wanted);
  return found;
}

// Attention to the pages of a layer, or to those of a memory.
void DecodePlan::attend(const Ints& q_cells, const Ints& to_cells, const Tensor& k, const Tensor& v,
                        const optional<Tensor>& k_scale, const optional<Tensor>& v_scale, double factor,
                        int64_t window, double soft_cap, const optional<Tensor>& bias, const optional<Tensor>& sinks,
                        bool remembers) {
  const Cells q = dense(q_cells, "queries"), to = dense(to_cells, "what attention gives");
  const Pages own = pages(k, v, k_scale, v_scale, remembers ? memory_pages : page_count);
  TORCH_CHECK_VALUE(q.width % (own.head_size * own.heads) == 0 && to.width == q.width, "queries of ", q.width,
                    " numbers do not fit pages of ", own.heads, " heads of ", own.head_size);
  const int64_t heads = q.width / own.head_size;
  tw::AttentionTask task = attention_task(own, heads, factor, window, soft_cap, !remembers, bias);
  task.sinks = floats(sinks, heads, "sinks");
  task.q_type = type;
  keep(bias), keep(sinks);
  if (bias) biased.push_back(task);
  const int64_t divided = kind({heads / own.heads, own.heads, task.sums_size(), remembers});
  push(
      [=, this](const Step& now) {
        tw::AttentionTask here = task;
        here.q = cell(now, q), here.out = cell(now, to);
        now.pieces[divided].attend(here, (float*)now.own);
      },
      [=](const Step& now) { return 4 * now.pieces[divided].sums; });
}

void DecodePlan::state_slots(const Tensor& state) {
  TORCH_CHECK_VALUE(state.dim() > 0 && (state_count < 0 || state_count == state.size(0)), "states of shape ",
                    state.sizes(), " do not fit the ", state_count, " slots before them");
  state_count = state.size(0);
  keep(state);
}

void DecodePlan::short_conv(const Ints& from_cells, const Ints& to_cells, const Tensor& weight,
                            const optional<Tensor>& bias, const Tensor& state, bool silu) {
  const Cells from = cells(from_cells), to = dense(to_cells, "a convolution's output");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) > 1 && weight.size(1) == from.width && to.width == from.width,
                    "rows of ", from.width, " and ", to.width, " numbers do not fit weights (width, channels) of shape ",
                    weight.sizes());
  state_slots(state);
  tw::ShortConvTask task{};
  task.channels = from.width, task.width = weight.size(0);
  task.states = states_of(state, {task.width - 1, task.channels});
  task.type = type, task.stride = from.stride, task.silu = silu;
  task.weight = floats(weight, weight.numel(), "weight"), task.bias = floats(bias, task.channels, "bias");
  keep(weight), keep(bias);
  push([=, this](const Step& now) {
    tw::ShortConvTask here = task;
    here.rows = now.states;
    here.x = cell(now, from), here.out = cell(now, to);
    convolve_rows(here);
  });
}

// A recurrence whose gains are `gains(step)`.
template <class Gains>
void DecodePlan::recurrence(const Ints& q_cells, const Ints& k_cells, const Ints& v_cells, const Ints& to_cells,
                            const optional<Tensor>& skip, const Tensor& state, int64_t heads, int64_t key_heads,
                            bool corrects, Gains gains) {
  const Cells q = cells(q_cells), k = cells(k_cells), v = cells(v_cells), to = dense(to_cells, "a recurrence's output");
  check_states(state, heads, key_heads);
  state_slots(state);
  tw::RecurrenceTask task{};
  task.heads = heads, task.key_heads = key_heads, task.key_size = state.size(2), task.size = state.size(3);
  TORCH_CHECK_VALUE(q.width == key_heads * task.key_size && k.width == q.width && q.stride == k.stride &&
                        v.width == heads * task.size && to.width == v.width,
                    "q, k and v of ", q.width, ", ", k.width, " and ", v.width, " numbers do not fit states of shape ",
                    state.sizes());
  task.states = states_of(state, {heads, task.key_size, task.size});
  task.skip = floats(skip, heads, "skip");
  task.type = type, task.stride = v.stride, task.corrects = corrects;
  tw::RecurrenceKeys keys{};
  keys.type = type, keys.stride = q.stride, keys.heads = key_heads, keys.size = task.key_size;
  keys.normalize = corrects;
  keep(skip);
  push(
      [=, this](const Step& now) {
        tw::RecurrenceTask here = task;
        here.rows = now.states;
        here.v = cell(now, v), here.out = cell(now, to);
        tw::RecurrenceKeys both = keys;
        both.q = cell(now, q), both.k = cell(now, k);
        recur_rows(both, here, now.rows, (float*)now.own, gains(now));
      },
      [=](const Step& now) { return 4 * now.rows * recurrence_floats(key_heads, task.key_size, heads); });
}

void DecodePlan::gated_delta(const Ints& q, const Ints& k, const Ints& v, const Ints& a_cells, const Ints& b_cells,
                             const Ints& to, const Tensor& rate, const Tensor& shift, const Tensor& state,
                             int64_t key_heads) {
  const Cells a = cells(a_cells), b = cells(b_cells);
  const int64_t heads = rate.numel();
  TORCH_CHECK_VALUE(a.width == heads && b.width == heads, "a and b of ", a.width, " and ", b.width, " numbers for ",
                    heads, " heads");
  const float *rates = floats(rate, heads, "rate"), *shifts = floats(shift, heads, "shift");
  keep(rate), keep(shift);
  recurrence(q, k, v, to, std::nullopt, state, heads, key_heads, true, [=, this](const Step& now) {
    return DeltaGains{{cell(now, a), type, a.stride}, {cell(now, b), type, b.stride}, rates, shifts};
  });
}

void DecodePlan::selective_scan(const Ints& q, const Ints& k, const Ints& v, const Ints& a_cells, const Ints& to,
                                const Tensor& rate, const Tensor& shift, const Tensor& skip, const Tensor& state,
                                int64_t key_heads) {
  const Cells a = cells(a_cells);
  const int64_t heads = rate.numel();
  TORCH_CHECK_VALUE(a.width == heads, "a of ", a.width, " numbers for ", heads, " heads");
  const float *rates = floats(rate, heads, "rate"), *shifts = floats(shift, heads, "shift");
  keep(rate), keep(shift);
  recurrence(q, k, v, to, skip, state, heads, key_heads, false, [=, this](const Step& now) {
    return ScanGains{{cell(now, a), type, a.stride}, rates, shifts};
  });
}

void DecodePlan::gated_norm(const Ints& x_cells, const Ints& gate_cells, const Ints& to_cells, const Tensor& weight,
                            double eps, bool gate_first) {
  const Cells x = dense(x_cells, "x"), gate = cells(gate_cells), to = dense(to_cells, "what a gated norm gives");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.numel() == x.width && gate.width == x.width && to.width == x.width &&
                        weight.size(1) % 16 == 0,
                    "x and gate of ", x.width, " and ", gate.width,
                    " numbers do not fit weights (groups, a multiple of 16) of ", weight.sizes());
  tw::GatedNormTask task{};
  task.type = type, task.heads = weight.size(0), task.size = weight.size(1), task.stride = gate.stride;
  task.weight = floats(weight, weight.numel(), "weight"), task.eps = float(eps), task.gate_first = gate_first;
  keep(weight);
  push([=, this](const Step& now) {
    tw::GatedNormTask here = task;
    here.x = cell(now, x), here.gate = cell(now, gate), here.out = cell(now, to);
    const auto& k = kernels();
    each_row(now.rows * task.heads, 8 * task.size, [&](int64_t row) { k.gated_norm(here, row); });
  });
}

}  // namespace
