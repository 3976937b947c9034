// Short convolutions and linear recurrences as operators. ops.cpp takes this in, whose helpers it uses.
#include <cmath>

#include "recurrent.h"

namespace {

// The states of a batch; checked. No two sequences or copies may share a slot, whose threads would overwrite each other.
tw::StateRows state_rows(const Tensor& starts, const Tensor& slots, const Tensor& mark_rows, const Tensor& mark_slots,
                         int64_t rows, int64_t states) {
  tw::StateRows all{};
  all.count = slots.numel(), all.marks = mark_rows.numel();
  all.starts = integers<int32_t>(starts, all.count + 1, "query_starts");
  all.slots = integers<int64_t>(slots, all.count, "slots");
  all.mark_rows = integers<int64_t>(mark_rows, all.marks, "mark_rows");
  all.mark_slots = integers<int64_t>(mark_slots, all.marks, "mark_slots");
  TORCH_CHECK_INDEX(all.starts[0] == 0 && all.starts[all.count] == rows, "query_starts does not cover the ", rows,
                    " rows");
  for (int64_t b = 0; b < all.count; b++)
    TORCH_CHECK_INDEX(all.starts[b] <= all.starts[b + 1], "query_starts is not ascending");
  for (int64_t i = 0; i < all.marks; i++)
    TORCH_CHECK_INDEX(all.mark_rows[i] >= (i ? all.mark_rows[i - 1] : 0) && all.mark_rows[i] < rows,
                      "mark_rows is not ascending, or beyond the ", rows, " rows");
  std::vector<int64_t> used(all.slots, all.slots + all.count);
  used.insert(used.end(), all.mark_slots, all.mark_slots + all.marks);
  std::sort(used.begin(), used.end());
  TORCH_CHECK_INDEX(used.empty() || (used.front() >= 0 && used.back() < states), "a slot is beyond the ", states,
                    " states");
  TORCH_CHECK_INDEX(std::adjacent_find(used.begin(), used.end()) == used.end(), "two states share a slot");
  return all;
}

float* states_of(const Tensor& state, c10::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(state.dim() == int64_t(sizes.size()) + 1 && state.sizes().slice(1) == sizes,
                    "states of shape ", state.sizes(), " are not (slots, …) of ", sizes);
  return const_cast<float*>(floats(state, state.numel(), "state"));
}

// Rows that may be a part of wider ones: the values between two of them.
int64_t stride_of(const Tensor& x, const char* what) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.stride(1) == 1, what, " of shape ", x.sizes(), " is not rows of adjacent values");
  return x.stride(0);
}

void convolve_rows(const tw::ShortConvTask& task) {
  constexpr int64_t BLOCK = 256;  // channels of a task: some lines of the cache from each token
  const int64_t blocks = up(task.channels, BLOCK) / BLOCK;
  const auto& k = kernels();
  each(task.rows.count * blocks, [&](int64_t i) {
    const int64_t begin = i % blocks * BLOCK;
    k.short_conv(task, i / blocks, begin, std::min(begin + BLOCK, task.channels));
  });
}

Tensor short_conv(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias, const Tensor& state,
                  const Tensor& starts, const Tensor& slots, const Tensor& mark_rows, const Tensor& mark_slots,
                  bool silu) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) > 1 && x.dim() == 2 && weight.size(1) == x.size(1), "x of shape ",
                    x.sizes(), " does not fit weights (width, channels) of shape ", weight.sizes());
  const int64_t tokens = x.size(0), channels = x.size(1), width = weight.size(0);
  tw::ShortConvTask task{};
  task.states = states_of(state, {width - 1, channels});
  task.rows = state_rows(starts, slots, mark_rows, mark_slots, tokens, state.size(0));
  task.x = x.const_data_ptr(), task.type = float_type(x, "x"), task.stride = stride_of(x, "x");
  task.channels = channels, task.width = width, task.silu = silu;
  task.weight = floats(weight, weight.numel(), "weight"), task.bias = floats(bias, channels, "bias");
  const Tensor out = at::empty({tokens, channels}, x.options());
  task.out = out.mutable_data_ptr();
  convolve_rows(task);
  return out;
}

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// A column of a projection: (tokens, heads) of float32 or bfloat16, perhaps a part of wider rows.
struct Column {
  const void* data;
  Type type;
  int64_t stride;

  float operator()(int64_t token, int64_t head) const {
    const int64_t at = token * stride + head;
    return type == Type::f32 ? ((const float*)data)[at] : float(((const c10::BFloat16*)data)[at]);
  }
};

Column column(const Tensor& x, int64_t tokens, int64_t heads, const char* what) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(0) == tokens && x.size(1) == heads, what, " of shape ", x.sizes(),
                    " is not (", tokens, ", ", heads, ")");
  return {x.const_data_ptr(), float_type(x, what), stride_of(x, what)};
}

// Each token's decay and gain of the gated delta rule.
struct DeltaGains {
  Column a, b;
  const float *rates, *shifts;
  std::pair<float, float> operator()(int64_t token, int64_t head) const {
    return {std::exp(-rates[head] * softplus(a(token, head) + shifts[head])), 1 / (1 + std::exp(-b(token, head)))};
  }
};

// And of Mamba-2, whose gain is how long a token's step is.
struct ScanGains {
  Column a;
  const float *rates, *shifts;
  std::pair<float, float> operator()(int64_t token, int64_t head) const {
    const float step = softplus(a(token, head) + shifts[head]);
    return {std::exp(-rates[head] * step), step};
  }
};

// Floats that a recurrence keeps of a token while it runs.
int64_t recurrence_floats(int64_t key_heads, int64_t key_size, int64_t heads) {
  return key_heads * (2 * key_size + 1) + 2 * heads;
}

// Either recurrence, with each token's decay and gain from `gains(token, head)`. `keys` and `task` lack what lies in
// `memory`, which has room for `recurrence_floats` of each token.
template <class Gains>
void recur_rows(tw::RecurrenceKeys keys, tw::RecurrenceTask task, int64_t tokens, float* memory, const Gains& gains) {
  const int64_t heads = task.heads, key_heads = task.key_heads, key_size = task.key_size;
  task.both = keys.both = memory;
  task.products = keys.products = keys.both + tokens * key_heads * 2 * key_size;
  float *const decays = keys.products + tokens * key_heads, *const all_gains = decays + tokens * heads;
  task.decay = decays, task.gain = all_gains;
  const auto& table = kernels();
  each_row(tokens, 4 * key_heads * key_size + 64 * heads, [&](int64_t token) {
    table.recurrence_keys(keys, token);
    for (int64_t head = 0; head < heads; head++) {
      const auto [by, of] = gains(token, head);
      decays[token * heads + head] = by, all_gains[token * heads + head] = of;
    }
  });
  constexpr int64_t COLUMNS = 32;
  const int64_t blocks = up(task.size, COLUMNS) / COLUMNS;
  each(task.rows.count * heads * blocks, [&](int64_t i) {
    table.recur(task, i / blocks / heads, i / blocks % heads, i % blocks * COLUMNS);
  });
}

// The states of a recurrence, by whose shape all others are checked.
void check_states(const Tensor& state, int64_t heads, int64_t key_heads) {
  TORCH_CHECK_VALUE(state.dim() == 4 && state.size(3) % 16 == 0, "states of shape ", state.sizes(),
                    " are not (slots, heads, key size, a multiple of 16)");
  TORCH_CHECK_VALUE(state.size(1) == heads, "states of shape ", state.sizes(), " are not of ", heads, " heads");
  TORCH_CHECK_VALUE(key_heads > 0 && heads % key_heads == 0, heads, " heads of values for ", key_heads, " of keys");
}

template <class Gains>
Tensor recurrence(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& skip, const Tensor& state,
                  const Tensor& starts, const Tensor& slots, const Tensor& mark_rows, const Tensor& mark_slots,
                  int64_t heads, int64_t key_heads, bool corrects, const Gains& gains) {
  check_states(state, heads, key_heads);
  const int64_t key_size = state.size(2), size = state.size(3), tokens = v.size(0);
  TORCH_CHECK_VALUE(q.dim() == 2 && q.sizes() == k.sizes() && q.size(0) == tokens && q.size(1) == key_heads * key_size &&
                        v.dim() == 2 && v.size(1) == heads * size && q.scalar_type() == v.scalar_type() &&
                        k.scalar_type() == v.scalar_type() && stride_of(q, "q") == stride_of(k, "k"),
                    "q, k and v of shapes ", q.sizes(), k.sizes(), v.sizes(), " do not fit the states");
  tw::RecurrenceTask task{};
  task.states = states_of(state, {heads, key_size, size});
  task.rows = state_rows(starts, slots, mark_rows, mark_slots, tokens, state.size(0));
  task.key_heads = key_heads, task.key_size = key_size, task.heads = heads, task.size = size;
  task.skip = floats(skip, heads, "skip");
  task.v = v.const_data_ptr(), task.stride = stride_of(v, "v"), task.corrects = corrects;
  tw::RecurrenceKeys keys{};
  keys.q = q.const_data_ptr(), keys.k = k.const_data_ptr(), keys.type = task.type = float_type(v, "v");
  keys.stride = q.stride(0), keys.heads = key_heads, keys.size = key_size, keys.normalize = corrects;
  const Tensor memory =
      at::empty({tokens * recurrence_floats(key_heads, key_size, heads)}, v.options().dtype(at::kFloat));
  const Tensor out = at::empty({tokens, heads * size}, v.options());
  task.out = out.mutable_data_ptr();
  recur_rows(keys, task, tokens, memory.mutable_data_ptr<float>(), gains);
  return out;
}

Tensor gated_delta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& b,
                   const Tensor& rate, const Tensor& shift, const Tensor& state, const Tensor& starts,
                   const Tensor& slots, const Tensor& mark_rows, const Tensor& mark_slots, int64_t key_heads) {
  const int64_t heads = rate.numel(), tokens = v.size(0);
  const DeltaGains gains{column(a, tokens, heads, "a"), column(b, tokens, heads, "b"), floats(rate, heads, "rate"),
                         floats(shift, heads, "shift")};
  return recurrence(q, k, v, std::nullopt, state, starts, slots, mark_rows, mark_slots, heads, key_heads, true, gains);
}

Tensor selective_scan(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& rate,
                      const Tensor& shift, const Tensor& skip, const Tensor& state, const Tensor& starts,
                      const Tensor& slots, const Tensor& mark_rows, const Tensor& mark_slots, int64_t key_heads) {
  const int64_t heads = rate.numel(), tokens = v.size(0);
  const ScanGains gains{column(a, tokens, heads, "a"), floats(rate, heads, "rate"), floats(shift, heads, "shift")};
  return recurrence(q, k, v, skip, state, starts, slots, mark_rows, mark_slots, heads, key_heads, false, gains);
}

Tensor gated_norm(const Tensor& x_in, const Tensor& gate, const Tensor& weight, double eps, bool gate_first) {
  const Tensor x = x_in.contiguous();
  TORCH_CHECK_VALUE(weight.dim() == 2 && x.dim() == 2 && x.size(1) == weight.numel() && x.sizes() == gate.sizes() &&
                        x.scalar_type() == gate.scalar_type() && weight.size(1) % 16 == 0,
                    "x and gate of shapes ", x.sizes(), gate.sizes(), " do not fit weights (groups, a multiple of 16) of ",
                    weight.sizes());
  tw::GatedNormTask task{};
  task.x = x.const_data_ptr(), task.gate = gate.const_data_ptr(), task.type = float_type(x, "x");
  task.heads = weight.size(0), task.size = weight.size(1), task.stride = stride_of(gate, "gate");
  task.weight = floats(weight, weight.numel(), "weight"), task.eps = float(eps), task.gate_first = gate_first;
  Tensor out = at::empty_like(x);
  task.out = out.mutable_data_ptr();
  const auto& k = kernels();
  each_row(x.size(0) * task.heads, 8 * task.size, [&](int64_t row) { k.gated_norm(task, row); });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.def(
      "short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor query_starts, Tensor slots, "
      "Tensor mark_rows, Tensor mark_slots, bool silu) -> Tensor");
  m.def(
      "gated_delta(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor rate, Tensor shift, Tensor(a!) state, "
      "Tensor query_starts, Tensor slots, Tensor mark_rows, Tensor mark_slots, int key_heads) -> Tensor");
  m.def(
      "selective_scan(Tensor q, Tensor k, Tensor v, Tensor a, Tensor rate, Tensor shift, Tensor skip, "
      "Tensor(a!) state, Tensor query_starts, Tensor slots, Tensor mark_rows, Tensor mark_slots, int key_heads) "
      "-> Tensor");
  m.def("gated_norm(Tensor x, Tensor gate, Tensor weight, float eps, bool gate_first) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchwright, CPU, m) {
  m.impl("short_conv", short_conv);
  m.impl("gated_delta", gated_delta);
  m.impl("selective_scan", selective_scan);
  m.impl("gated_norm", gated_norm);
}
