// What lies between products: norms, gates, activations, rotary embedding with the cache's write, recurrences.
#include <algorithm>

#include "encoder.h"
#include "harness.h"
#include "norm.h"
#include "recurrent.h"

namespace levels {

using tw::Activation;

enum class Norm { rms, added, alone, layer };

// Forward, and backward from what it found.
std::vector<Written> norm(const Kernels& k, Type type, int64_t features, Norm kind) {
  Random random(features);
  constexpr int64_t ROWS = 3;
  const auto x = numbers(random, type, ROWS * features), more = numbers(random, type, ROWS * features);
  const auto weight = random.reals(features), bias = random.reals(features);
  Written out(type, ROWS * features), sum(type, ROWS * features), d_x(type, ROWS * features);
  Written mean(Type::f32, ROWS), inverse(Type::f32, ROWS), d_weight(Type::f32, features), d_bias(Type::f32, features);
  tw::NormTask task{};
  task.x = x.data(), task.out = out.data(), task.type = type, task.features = features, task.eps = 1e-5f;
  task.inverse = (float*)inverse.data();
  if (kind != Norm::alone) task.weight = weight.data();
  if (kind == Norm::added) task.residual = more.data(), task.sum = sum.data();
  if (kind == Norm::layer) task.bias = bias.data(), task.centered = true, task.mean = (float*)mean.data();
  for (int64_t row = 0; row < ROWS; row++) k.norm(task, row);
  tw::NormBackwardTask back{};
  back.grad = more.data(), back.x = x.data(), back.mean = task.mean, back.inverse = task.inverse;
  back.weight = task.weight, back.d_x = d_x.data(), back.type = type, back.features = features, back.block = ROWS;
  back.d_weight = (float*)d_weight.data(), back.d_bias = (float*)d_bias.data();
  k.norm_backward(back, 0, ROWS);
  return {out, sum, mean, inverse, d_x, d_weight, d_bias};
}

std::vector<Written> activations(const Kernels& k, Type type, int64_t features) {
  Random random(features);
  auto x = numbers(random, type, 2 * features);
  std::vector<float> large = random.reals(2 * features, 30);
  for (int64_t i = 0; i < 2 * features; i++) {
    const uint16_t b = narrow(large[i]);
    if (type == Type::f32) std::memcpy(&x[4 * i], &large[i], 4);
    else std::memcpy(&x[2 * i], &b, 2);
  }
  std::vector<Written> all;
  for (int kind = 0; kind <= int(Activation::hardsigmoid); kind++) {
    all.emplace_back(type, features);
    k.activate_row(x.data(), all.back().data(), type, features, 0, Activation(kind));
  }
  for (const Activation kind : {Activation::silu, Activation::gelu_tanh, Activation::clamped_swiglu}) {
    all.emplace_back(type, features);
    k.gated(x.data(), all.back().data(), type, features, 0, kind);
  }
  all.emplace_back(Type::f32, features + 1);
  const float peak = k.widen_peak(x.data(), type, (float*)all.back().data(), features);
  std::memcpy(&all.back().bytes[4 * features], &peak, 4);
  return all;
}

std::vector<Written> finished(const Kernels& k, Type type, int64_t features, Activation kind, bool residual) {
  Random random(features);
  constexpr int64_t ROWS = 2;
  const auto before = numbers(random, type, ROWS * features), more = numbers(random, type, ROWS * features);
  const auto centers = random.reals(ROWS), sums = random.reals(features + 64);
  Written out(type, ROWS * features);
  std::memcpy(out.data(), before.data(), out.bytes.size());
  const tw::FinishTask t{out.data(), centers.data(), sums.data(), residual ? more.data() : nullptr, type, kind, features};
  k.finish(t, 0, ROWS, 0, features);
  return {out};
}

std::vector<Written> turned(const Kernels& k, Type type) {
  Random random(5);
  constexpr int64_t TOKENS = 3, HEADS = 2, SIZE = 20, PADDED = 32;
  const auto qkv = numbers(random, type, TOKENS * 3 * HEADS * SIZE);
  const auto cos = random.reals(TOKENS * SIZE / 2), sin = random.reals(TOKENS * SIZE / 2);
  Written out(type, TOKENS * 3 * HEADS * PADDED);
  const tw::TurnTask t{qkv.data(), out.data(), type, cos.data(), sin.data(), HEADS, SIZE, PADDED};
  for (int64_t token = 0; token < TOKENS; token++) k.turn_heads(t, token);
  return {out};
}

std::vector<Written> rope(const Kernels& k, Type type, Type kv, bool norms, int64_t rotated) {
  Random random(rotated);
  constexpr int64_t TOKENS = 3, HEADS = 4, KV_HEADS = 2, SIZE = 48, PAGES = 3;
  const auto qkv = numbers(random, type, TOKENS * (HEADS + 2 * KV_HEADS) * SIZE);
  const auto cos = random.reals(9 * SIZE), sin = random.reals(9 * SIZE), of_q = random.reals(SIZE), of_k = random.reals(SIZE);
  const int64_t positions[TOKENS] = {3, 4, 8}, slots[TOKENS] = {5, 17, 47}, all = PAGES * KV_HEADS * tw::PAGE;
  Written q(type, TOKENS * HEADS * SIZE), key(kv, all * SIZE), value(kv, all * SIZE), k_scale(Type::f32, all);
  Written v_scale(Type::f32, all);
  tw::RopeTask t{};
  t.qkv = qkv.data(), t.type = type, t.cos = cos.data(), t.sin = sin.data(), t.rotated = rotated;
  t.positions = positions, t.slots = slots, t.k = key.data(), t.v = value.data();
  t.k_scale = (float*)k_scale.data(), t.v_scale = (float*)v_scale.data(), t.kv_type = kv;
  t.heads = HEADS, t.kv_heads = KV_HEADS, t.head_size = SIZE, t.eps = 1e-5f, t.q = q.data();
  if (norms) t.q_norm = of_q.data(), t.k_norm = of_k.data();
  for (int64_t token = 0; token < TOKENS; token++) k.rope_store(t, token);
  return {q, key, value, k_scale, v_scale};
}

const int32_t STARTS[] = {0, 5, 6};
const int64_t SLOTS[] = {2, 0}, MARK_ROWS[] = {1, 3}, MARK_SLOTS[] = {1, 3};
const tw::StateRows STATES{STARTS, SLOTS, MARK_ROWS, MARK_SLOTS, 2, 2};
constexpr int64_t TOKENS = 6, KEPT = 4;

std::vector<Written> short_conv(const Kernels& k, Type type, int64_t channels, bool silu) {
  Random random(channels);
  constexpr int64_t WIDTH = 4;
  const auto x = numbers(random, type, TOKENS * channels);
  const auto weight = random.reals(WIDTH * channels), bias = random.reals(channels);
  const auto before = random.reals(KEPT * (WIDTH - 1) * channels);
  Written states(Type::f32, int64_t(before.size())), out(type, TOKENS * channels);
  std::memcpy(states.data(), before.data(), states.bytes.size());
  const tw::ShortConvTask t{STATES, x.data(), type, channels, channels, WIDTH, weight.data(), silu ? bias.data() : nullptr,
                            (float*)states.data(), silu, out.data()};
  for (int64_t sequence = 0; sequence < 2; sequence++) k.short_conv(t, sequence, 0, channels);
  return {states, out};
}

std::vector<Written> recurrence(const Kernels& k, Type type, bool corrects, int64_t size) {
  Random random(size);
  constexpr int64_t KEY_HEADS = 2, HEADS = 4, KEY = 32;
  const auto q = numbers(random, type, TOKENS * KEY_HEADS * KEY), key = numbers(random, type, TOKENS * KEY_HEADS * KEY);
  const auto v = numbers(random, type, TOKENS * HEADS * size), gate = numbers(random, type, TOKENS * HEADS * size);
  const auto decay = random.reals(TOKENS * HEADS), gain = random.reals(TOKENS * HEADS), skip = random.reals(HEADS);
  const auto before = random.reals(KEPT * HEADS * KEY * size), weight = random.reals(HEADS * size);
  Written both(Type::f32, TOKENS * KEY_HEADS * 2 * KEY), products(Type::f32, TOKENS * KEY_HEADS);
  Written states(Type::f32, int64_t(before.size())), out(type, TOKENS * HEADS * size), normed(type, TOKENS * HEADS * size);
  std::memcpy(states.data(), before.data(), states.bytes.size());
  const tw::RecurrenceKeys keys{q.data(), key.data(), type, KEY_HEADS * KEY, KEY_HEADS, KEY, corrects,
                                (float*)both.data(), (float*)products.data()};
  for (int64_t token = 0; token < TOKENS; token++) k.recurrence_keys(keys, token);
  const tw::RecurrenceTask t{STATES, (float*)both.data(), (float*)products.data(), decay.data(), gain.data(),
                             corrects ? skip.data() : nullptr, v.data(), type, HEADS * size, KEY_HEADS, HEADS, KEY, size,
                             (float*)states.data(), corrects, out.data()};
  for (int64_t sequence = 0; sequence < 2; sequence++)
    for (int64_t head = 0; head < HEADS; head++)
      for (int64_t column = 0; column < size; column += 32) k.recur(t, sequence, head, column);
  const tw::GatedNormTask norm{out.data(), gate.data(), type, size, HEADS, HEADS * size, weight.data(), 1e-5f, corrects,
                               normed.data()};
  for (int64_t row = 0; row < TOKENS * HEADS; row++) k.gated_norm(norm, row);
  return {both, products, states, out, normed};
}

std::vector<Case> layer_cases() {
  std::vector<Case> all;
  const auto add = [&](std::string name, auto run) { all.push_back({name, false, run}); };
  for (const Type type : {Type::f32, Type::bf16}) {
    for (const int64_t features : {5, 48, 67}) {
      for (const Norm kind : {Norm::rms, Norm::added, Norm::alone, Norm::layer})
        add("norm", [=](const Kernels& k) { return norm(k, type, features, kind); });
      for (const bool residual : {false, true}) {
        for (const Activation kind : {Activation::none, Activation::gelu, Activation::silu})
          add("finish", [=](const Kernels& k) { return finished(k, type, features, kind, residual); });
      }
      add("activations", [=](const Kernels& k) { return activations(k, type, features); });
    }
    add("turn_heads", [=](const Kernels& k) { return turned(k, type); });
    for (const Type kv : {Type::f32, Type::bf16, Type::s8})
      for (const bool norms : {false, true})
        for (const int64_t rotated : {0, 32, 48}) add("rope_store", [=](const Kernels& k) { return rope(k, type, kv, norms, rotated); });
    for (const bool is : {false, true}) {
      for (const int64_t channels : {16, 41}) add("short_conv", [=](const Kernels& k) { return short_conv(k, type, channels, is); });
      for (const int64_t size : {16, 64}) add("recurrence", [=](const Kernels& k) { return recurrence(k, type, is, size); });
    }
  }
  return all;
}

}  // namespace levels
