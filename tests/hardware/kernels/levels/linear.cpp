// Linear layers, their rows, and low-rank adapters.
#include <algorithm>

#include "harness.h"

namespace levels {

using tw::DEPTH;
using tw::LinearTask;
using tw::PANEL;
using tw::SUMMED;

constexpr int64_t FEATURES = 70, PANELS = 2, DEPTHS = 256, APART = 64;

// Rows made integers of so many digits.
struct Rows {
  int64_t count, digits, stride = DEPTHS + APART;
  std::vector<int8_t> q;
  std::vector<float> scale;
  std::vector<int32_t> sums;

  Rows(const Kernels& k, const std::vector<float>& x, int64_t width, int64_t digits)
      : count(int64_t(x.size()) / width), digits(digits), q(count * digits * stride), scale(count),
        sums(count * digits * (DEPTHS / SUMMED + 1)) {
    const tw::QuantizedRows to{q.data(), scale.data(), sums.data(), DEPTHS, stride, digits};
    for (int64_t row = 0; row < count; row++) k.quantize(x.data(), Type::f32, width, row, to);
  }
};

LinearTask integer_task(const Rows& rows, const std::vector<uint8_t>& weight, const std::vector<float>& scale,
                        const float* bias, int64_t group, Written& out) {
  LinearTask t{};
  t.weight = weight.data(), t.scale = scale.data(), t.bias = bias;
  t.rows = rows.q.data(), t.row_scale = rows.scale.data(), t.row_sums = rows.sums.data();
  t.out = out.data(), t.out_type = out.type, t.row_end = rows.count, t.panel_end = PANELS;
  t.depth = DEPTHS, t.row_stride = rows.stride, t.digits = rows.digits, t.group = group;
  t.features = t.out_stride = FEATURES;
  return t;
}

// A panel's groups: multipliers within ±15, then nibbles.
std::vector<uint8_t> weights_4(Random& random, int64_t group) {
  const int64_t bytes = PANEL + group * PANEL / 2;
  std::vector<uint8_t> all = random.bytes(PANELS * (DEPTHS / group) * bytes);
  for (size_t at = 0; at < all.size(); at += bytes)
    for (int64_t f = 0; f < PANEL; f++) all[at + f] = uint8_t(int8_t(random.below(31) - 15));
  return all;
}

std::vector<uint8_t> weights_16(Random& random) {
  const std::vector<char> all = numbers(random, Type::bf16, PANELS * PANEL * DEPTHS);
  return {all.begin(), all.end()};
}

std::vector<uint8_t> weights_grouped(Random& random, int64_t group, int64_t bits, bool floats) {
  const int64_t bytes = tw::grouped_bytes(group, bits, floats);
  std::vector<uint8_t> all = random.bytes(PANELS * (DEPTHS / group) * bytes);
  for (size_t at = 0; at < all.size(); at += bytes)
    for (int64_t i = 0; i < PANEL * (floats ? 1 : 2); i++) {
      const float x = random.real();
      if (floats && bits == 4) all[at + i] = uint8_t(120 + random.below(8));
      else std::memcpy(&all[at + 4 * i], &x, 4);
    }
  return all;
}

// Rows in bfloat16.
LinearTask wide_task(const std::vector<uint16_t>& rows, const std::vector<uint8_t>& weight, const float* bias,
                     Written& out) {
  LinearTask t{};
  t.weight = weight.data(), t.bias = bias, t.rows = rows.data(), t.out = out.data(), t.out_type = out.type;
  t.row_stride = 2 * DEPTHS + APART, t.row_end = int64_t(rows.size()) * 2 / t.row_stride, t.panel_end = PANELS;
  t.depth = DEPTHS, t.digits = 1, t.features = t.out_stride = FEATURES;
  return t;
}

std::vector<uint16_t> wide_rows(const Kernels& k, Random& random, int64_t count, int64_t width) {
  const std::vector<float> x = random.reals(count * width);
  const int64_t stride = DEPTHS + APART / 2;
  std::vector<uint16_t> rows(count * stride);
  for (int64_t row = 0; row < count; row++)
    k.widen_row(x.data(), Type::f32, width, row, rows.data(), DEPTHS, stride);
  return rows;
}

std::vector<Written> integers(const Kernels& k, int64_t rows, int64_t width, int64_t digits, int64_t group, Type type) {
  Random random(rows + digits * 100 + group);
  const std::vector<uint8_t> weight = group ? weights_4(random, group) : random.bytes(PANELS * PANEL * DEPTHS);
  const std::vector<float> scale = random.reals(PANELS * PANEL), bias = random.reals(FEATURES);
  const Rows made(k, random.reals(rows * width), width, digits);
  Written out(type, rows * FEATURES);
  const LinearTask t = integer_task(made, weight, scale, rows % 2 ? bias.data() : nullptr, group, out);
  (group ? k.linear_w4 : k.linear_w8)(t);
  return {out};
}

std::vector<Written> wide(const Kernels& k, int64_t rows, int64_t width, int64_t group, int64_t bits, bool floats,
                          Type type) {
  Random random(rows + bits * 100 + group);
  const std::vector<uint8_t> weight = group ? weights_grouped(random, group, bits, floats) : weights_16(random);
  const std::vector<float> bias = random.reals(FEATURES);
  const std::vector<uint16_t> made = wide_rows(k, random, rows, width);
  Written out(type, rows * FEATURES);
  LinearTask t = wide_task(made, weight, rows % 2 ? bias.data() : nullptr, out);
  t.group = group, t.bits = bits, t.floats = floats;
  (group ? k.linear_grouped : k.linear_bf16)(t);
  return {out};
}

std::vector<Written> quantized(const Kernels& k, int64_t width, int64_t digits, Type type, bool centered) {
  Random random(width + digits);
  constexpr int64_t ROWS = 3, PARTS = DEPTHS / SUMMED + 1;
  const std::vector<char> x = numbers(random, type, ROWS * width);
  Written q(Type::s8, ROWS * digits * DEPTHS), scale(Type::f32, ROWS), centers(Type::f32, ROWS);
  Written sums(Type::f32, ROWS * digits * PARTS);
  const tw::QuantizedRows to{(int8_t*)q.data(), (float*)scale.data(), (int32_t*)sums.data(), DEPTHS, DEPTHS, digits};
  for (int64_t row = 0; row < ROWS; row++)
    if (centered) k.quantize_centered(x.data(), type, width, row, to, (float*)centers.data());
    else k.quantize(x.data(), type, width, row, to);
  return {q, scale, sums, centers};
}

std::vector<Written> quantized_4(const Kernels& k, int64_t group) {
  Random random(group);
  const std::vector<float> weight = random.reals(DEPTHS), importance = random.reals(DEPTHS);
  std::vector<float> positive(importance);
  for (float& x : positive) x = std::fabs(x);
  Written integers(Type::s8, DEPTHS), multipliers(Type::s8, DEPTHS / group), scale(Type::f32, 1);
  k.quantize_w4(weight.data(), positive.data(), DEPTHS, group, (int8_t*)integers.data(), (int8_t*)multipliers.data(),
                (float*)scale.data());
  return {integers, multipliers, scale};
}

std::vector<Written> low_rank(const Kernels& k, int64_t width, int64_t features) {
  Random random(width);
  constexpr int64_t RANKS = 32, COUNT = 6;
  const int64_t blocks = (features + 15) / 16;
  const auto a = numbers(random, Type::bf16, RANKS / 16 * ((width + 1) / 2) * 32);
  const auto b = numbers(random, Type::bf16, blocks * RANKS * 16), x = numbers(random, Type::bf16, 9 * width);
  std::vector<tw::LowRankBlock> parts;
  for (int64_t i = 0; i < blocks; i++) parts.push_back({(const uint16_t*)b.data() + i * RANKS * 16, i % 2 * 16, 8});
  Written middle(Type::bf16, COUNT * RANKS), y(Type::bf16, 9 * features);
  const auto before = numbers(random, Type::bf16, 9 * features);
  std::memcpy(y.data(), before.data(), y.bytes.size());
  const int64_t rows[COUNT] = {8, 0, 3, 4, 7, 1};
  const tw::LowRankTask t{(const uint16_t*)a.data(), parts.data(), (const uint16_t*)x.data(), (uint16_t*)y.data(), rows,
                          (uint16_t*)middle.data(), COUNT, width, features, RANKS};
  for (int64_t block = 0; block < RANKS / 16; block++) k.low_rank_shrink(t, 0, COUNT, block);
  k.low_rank_expand(t, 0, blocks);
  return {middle, y};
}

std::vector<Case> linear_cases() {
  std::vector<Case> all;
  const auto add = [&](std::string name, bool pairs, auto run) { all.push_back({name, pairs, run}); };
  for (const Type type : {Type::f32, Type::bf16}) {
    const std::string in = type == Type::f32 ? " float32" : " bfloat16";
    for (const int64_t width : {1, 70, 128, 256}) {
      const std::string of = in + " of " + std::to_string(width);
      for (const int64_t digits : {1, 2})
        add("quantize" + of, false, [=](const Kernels& k) { return quantized(k, width, digits, type, false); });
      add("quantize_centered" + of, false, [=](const Kernels& k) { return quantized(k, width, 1, type, true); });
    }
    for (const int64_t rows : {1, 2, 3, 4, 5, 8, 27})
      for (const int64_t group : {0, 32, 64, 128}) {
        const std::string of = in + ", rows " + std::to_string(rows) + ", group " + std::to_string(group);
        for (const int64_t digits : {1, 2})
          add("integers" + of, false, [=](const Kernels& k) { return integers(k, rows, 200, digits, group, type); });
        if (!group) add("bfloat16" + of, true, [=](const Kernels& k) { return wide(k, rows, 200, 0, 16, false, type); });
        else
          for (const int64_t bits : {4, 8})
            for (const bool floats : {false, true})
              add("grouped" + of, true, [=](const Kernels& k) { return wide(k, rows, 200, group, bits, floats, type); });
      }
  }
  for (const int64_t group : {32, 64, 128}) add("quantize_w4", false, [=](const Kernels& k) { return quantized_4(k, group); });
  for (const int64_t width : {16, 70, 129})
    for (const int64_t features : {16, 50}) add("low rank", true, [=](const Kernels& k) { return low_rank(k, width, features); });
  return all;
}

// x + y rounded to odd, as BFDOT does: toward zero, and the last bit set where something was lost. What is too small
// for a normal number is zero.
float add_to_odd(float x, float y) {
  const double s = double(x) + double(y), from_y = s - double(x);
  const double lost = (double(x) - (s - from_y)) + (double(y) - from_y);
  float f = float(s);
  if (std::fabs(double(f)) > std::fabs(s)) f = std::nextafterf(f, 0);
  const bool exact = double(f) == s;
  if (exact && lost != 0 && std::signbit(lost) != std::signbit(s)) f = std::nextafterf(f, 0);
  if (std::fabs(f) < 0x1p-126f) return std::copysign(0.0f, f);
  if (exact && lost == 0) return f;
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  bits |= 1;
  std::memcpy(&f, &bits, 4);
  return f;
}

float add_pair(float acc, float w0, float a0, float w1, float a1, Pairs pairs) {
  if (pairs == Pairs::fused) return std::fma(w1, a1, std::fma(w0, a0, acc));
  return add_to_odd(acc, add_to_odd(w0 * a0, w1 * a1));
}

int64_t count_wrong(const Written& out, int64_t rows, const std::function<float(int64_t, int64_t)>& of) {
  int64_t wrong = 0;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t f = 0; f < FEATURES; f++) {
      const float wanted = of(r, f), found = out.at(r * FEATURES + f);
      wrong += std::memcmp(&wanted, &found, 4) != 0;
    }
  return wrong;
}

int64_t check_integers(const Kernels& k, int64_t rows, int64_t group) {
  Random random(7 * rows + group);
  const std::vector<uint8_t> weight = group ? weights_4(random, group) : random.bytes(PANELS * PANEL * DEPTHS);
  const std::vector<float> scale = random.reals(PANELS * PANEL);
  const Rows made(k, random.reals(rows * 200), 200, 1);
  Written out(Type::f32, rows * FEATURES);
  (group ? k.linear_w4 : k.linear_w8)(integer_task(made, weight, scale, nullptr, group, out));
  return count_wrong(out, rows, [&](int64_t r, int64_t feature) {
    const int64_t panel = feature / PANEL, f = feature % PANEL, groups = group ? DEPTHS / group : 1;
    int32_t sum = 0;
    for (int64_t i = 0; i < DEPTHS; i++) {
      const int32_t a = made.q[r * made.stride + i];
      if (!group) {
        sum += a * (weight[panel * DEPTHS * PANEL + i / 4 * 4 * PANEL + f * 4 + i % 4] - 128);
        continue;
      }
      const uint8_t* from = &weight[(panel * groups + i / group) * (PANEL + group * PANEL / 2)];
      const int64_t in = i % group;
      const uint8_t two = from[PANEL + in / 8 * 4 * PANEL + f * 4 + in % 4];
      sum += a * ((in % 8 < 4 ? two & 15 : two >> 4) - 8) * int8_t(from[f]);
    }
    return float(sum) * made.scale[r] * scale[feature];
  });
}

int64_t check_pairs(const Kernels& k, int64_t rows, Pairs pairs) {
  Random random(11 * rows);
  const std::vector<uint8_t> weight = weights_16(random);
  const std::vector<uint16_t> made = wide_rows(k, random, rows, 200);
  Written out(Type::f32, rows * FEATURES);
  k.linear_bf16(wide_task(made, weight, nullptr, out));
  const auto* w = (const uint16_t*)weight.data();
  return count_wrong(out, rows, [&](int64_t r, int64_t feature) {
    const uint16_t *a = &made[r * (DEPTHS + APART / 2)], *of = w + feature / PANEL * PANEL * DEPTHS + feature % PANEL * 2;
    float acc = 0;
    for (int64_t i = 0; i < DEPTHS; i += 2, of += 2 * PANEL)
      acc = add_pair(acc, levels::wide(of[0]), levels::wide(a[i]), levels::wide(of[1]), levels::wide(a[i + 1]), pairs);
    return acc;
  });
}

int64_t check_products(const Kernels& k, Pairs pairs) {
  int64_t wrong = 0;
  for (const int64_t rows : {1, 2, 3, 4, 9, 30}) {
    for (const int64_t group : {0, 32, 64, 128}) wrong += check_integers(k, rows, group);
    wrong += check_pairs(k, rows, pairs);
  }
  return wrong;
}

}  // namespace levels
