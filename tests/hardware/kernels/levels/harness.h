// Runs the kernels of one instruction set and of `portable` on the same numbers and compares what they write.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels.h"

namespace levels {

using tw::Kernels;
using tw::Type;

// Numbers that every machine draws alike.
class Random {
 public:
  explicit Random(uint64_t seed) : state(seed * 2654435769u + 1) {}

  uint32_t bits() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 32);
  }
  int64_t below(int64_t end) { return int64_t(bits() % uint64_t(end)); }
  float real() { return float(int32_t(bits())) * 0x1p-31f; }  // between -1 and 1

  std::vector<float> reals(int64_t count, float size = 1) {
    std::vector<float> all(count);
    for (float& x : all) x = real() * size;
    return all;
  }
  std::vector<uint8_t> bytes(int64_t count) {
    std::vector<uint8_t> all(count);
    for (uint8_t& x : all) x = uint8_t(bits());
    return all;
  }

 private:
  uint64_t state;
};

inline float wide(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A float16 of at most 1, by its bits: any exponent up to one's.
inline uint16_t some_half(Random& random) { return uint16_t((random.bits() & 0x8000) | random.below(0x3c00)); }

inline int64_t size_of(Type type) { return type == Type::f32 ? 4 : type == Type::s8 ? 1 : 2; }

// Some numbers of a type, with whole lines behind them, which kernels may read and not use.
inline std::vector<char> numbers(Random& random, Type type, int64_t count) {
  std::vector<char> all(count * size_of(type) + 64);
  for (int64_t i = 0; i < count; i++) {
    const float x = random.real();
    const uint16_t b = narrow(x), h = some_half(random);
    if (type == Type::f32) std::memcpy(&all[4 * i], &x, 4);
    else if (type == Type::bf16) std::memcpy(&all[2 * i], &b, 2);
    else if (type == Type::f16) std::memcpy(&all[2 * i], &h, 2);
    else all[i] = char(int(x * 127));
  }
  return all;
}

// What a kernel wrote.
struct Written {
  Type type;
  std::vector<char> bytes;

  Written(Type type, int64_t count) : type(type), bytes(count * size_of(type)) {}
  void* data() { return bytes.data(); }
  int64_t count() const { return int64_t(bytes.size()) / size_of(type); }
  float at(int64_t i) const {
    float x;
    uint16_t b;
    if (type == Type::s8) return float((signed char)bytes[i]);
    if (type == Type::f32) return std::memcpy(&x, &bytes[4 * i], 4), x;
    std::memcpy(&b, &bytes[2 * i], 2);
    if (type == Type::bf16) return wide(b);
    return std::ldexp(float(b & 0x3ff) + (b & 0x7c00 ? 1024 : 0), std::max(1, b >> 10 & 31) - 25) * (b & 0x8000 ? -1 : 1);
  }
};

struct Case {
  std::string name;
  bool pairs;  // it sums products of bfloat16, which an instruction set may round in its own way
  std::function<std::vector<Written>(const Kernels&)> run;
};

// The largest difference, over the largest number.
inline double distance(const Written& found, const Written& wanted) {
  double most = 1e-30, apart = 0;
  for (int64_t i = 0; i < wanted.count(); i++) {
    most = std::max(most, std::fabs(double(wanted.at(i))));
    const double off = std::fabs(double(found.at(i)) - double(wanted.at(i)));
    apart = std::isnan(off) ? INFINITY : std::max(apart, off);
  }
  return apart / most;
}

// The bfloat16 of a single row: products of pairs as the instruction set sums them.
enum class Pairs { fused, bfdot };

std::vector<Case> linear_cases();
std::vector<Case> attention_cases();
std::vector<Case> layer_cases();
std::vector<Case> convolution_cases();

// The same products from their definition. The number that differ.
int64_t check_products(const Kernels& k, Pairs pairs);

}  // namespace levels
