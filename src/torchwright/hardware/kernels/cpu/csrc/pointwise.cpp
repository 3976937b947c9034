// The small operations between the linear layers, a row at a time: gates, rotary embedding with the KV write.
#include <cmath>

#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::LARGEST_HEAD;
using tw::PAGE;
using tw::RopeTask;
using tw::Type;

template <class T>
inline float get(const T* p) {
  if constexpr (sizeof(T) == 4) return float(*p);
  else return widen(*p);
}

inline void set(float* p, float x) { *p = x; }
inline void set(uint16_t* p, float x) { *p = narrow(x); }

inline F activate(F x, bool silu) {
  if (silu) {
    const F y = x / (exp(-max(x, splat(-80.0f))) + 1.0f);
    return select(x < -80.0f, F{}, y);
  }
  const F inner = (x + x * x * x * 0.044715f) * 0.7978845608f;
  return x * 0.5f * (tanh(inner) + 1.0f);
}

template <class T>
float widen_peak_of(const T* x, float* out, int64_t count) {
  F top = splat(-INFINITY), odd = F{};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const F v = load_f32(x + i);
    store_f32(out + i, v);
    top = max(v, top);
    odd = select(v != v, v, odd);
  }
  float peak = largest(top), nan = sum(odd);
  for (; i < count; i++) {
    const float v = get(x + i);
    out[i] = v;
    peak = v > peak ? v : peak;
    nan = v != v ? v : nan;
  }
  return nan != nan ? nan : peak;
}

// Some values as float32, and the largest of them: NaN where one is. `x` may be what `out` will be, or lie in the last
// half of it, because values are read in order and each is read before its place is written.
float widen_peak(const void* x, Type type, float* out, int64_t count) {
  if (type == Type::f32) return widen_peak_of((const float*)x, out, count);
  return widen_peak_of((const uint16_t*)x, out, count);
}

// Gate and value of gpt-oss: silu(1.702 g) / 1.702 · (u + 1), both within the limit; a NaN stays one.
inline F clamped_swiglu(F g, F u) {
  constexpr float ALPHA = 1.702f, LIMIT = 7;
  g = select(g > splat(LIMIT), splat(LIMIT), g);
  u = select(u > splat(LIMIT), splat(LIMIT), select(u < splat(-LIMIT), splat(-LIMIT), u));
  return activate(g * ALPHA, true) * (1 / ALPHA) * (u + 1.0f);
}

template <class T>
void gated_row(const T* x, T* out, int64_t features, tw::Activation activation) {
  const auto apply = [&](F gate, F value) {
    if (activation == tw::Activation::clamped_swiglu) return clamped_swiglu(gate, value);
    return activate(gate, activation == tw::Activation::silu) * value;
  };
  int64_t i = 0;
  for (; i + LANES <= features; i += LANES) store_f32(out + i, apply(load_f32(x + i), load_f32(x + features + i)));
  for (; i < features; i++) set(out + i, apply(splat(get(x + i)), splat(get(x + features + i)))[0]);
}

void gated(const void* x, void* out, Type type, int64_t features, int64_t row, tw::Activation activation) {
  if (type == Type::f32)
    gated_row((const float*)x + row * 2 * features, (float*)out + row * features, features, activation);
  else
    gated_row((const uint16_t*)x + row * 2 * features, (uint16_t*)out + row * features, features, activation);
}

template <class T>
void load_head(const T* from, float* head, int64_t size) {
  for (int64_t i = 0; i < size; i++) head[i] = get(from + i);
}

void norm_head(float* head, const float* weight, int64_t size, float eps) {
  if (!weight) return;
  float squares = 0;
  for (int64_t i = 0; i < size; i++) squares += head[i] * head[i];
  const float inverse = 1 / std::sqrt(squares / float(size) + eps);
  for (int64_t i = 0; i < size; i++) head[i] *= inverse * weight[i];
}

void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

// The scale of one head, and what to multiply by. A NaN or an infinity makes the scale one.
float step(const float* x, int64_t size, float* scale) {
  float top = 0;
  for (int64_t d = 0; d < size; d++) {
    const float size_d = std::fabs(x[d]);
    if (size_d > top || size_d != size_d) top = size_d;
  }
  *scale = top / 127;
  return top > tw::LEVELS_8 * tw::SMALLEST_STEP ? tw::LEVELS_8 / top : 0;
}

inline int8_t to_s8(float x) {
  const float nearest = std::nearbyint(x);
  return nearest >= -127 && nearest <= 127 ? int8_t(nearest) : int8_t(127);  // 127 for NaN
}

// One head's key and value of one token into its page (layouts: kernels/reference.py).
void store_kv(const RopeTask& t, int64_t slot, int64_t head, const float* key, const float* value) {
  const int64_t page = slot / PAGE, at = slot % PAGE, size = t.head_size;
  const int64_t base = (page * t.kv_heads + head) * PAGE * size;
  if (t.kv_type == Type::f32) {
    float *k = (float*)t.k + base, *v = (float*)t.v + base;
    for (int64_t d = 0; d < size; d++) k[d * PAGE + at] = key[d];
    for (int64_t d = 0; d < size; d++) v[at * size + d] = value[d];
  } else if (t.kv_type == Type::bf16) {
    uint16_t *k = (uint16_t*)t.k + base, *v = (uint16_t*)t.v + base;
    for (int64_t d = 0; d < size; d++) k[(d / 2 * PAGE + at) * 2 + d % 2] = narrow(key[d]);
    for (int64_t d = 0; d < size; d++) v[(at / 2 * size + d) * 2 + at % 2] = narrow(value[d]);
  } else {
    int8_t *k = (int8_t*)t.k + base, *v = (int8_t*)t.v + base;
    const int64_t scale = (page * t.kv_heads + head) * PAGE + at;
    const float by_k = step(key, size, t.k_scale + scale), by_v = step(value, size, t.v_scale + scale);
    for (int64_t d = 0; d < size; d++) k[d * PAGE + at] = to_s8(key[d] * by_k);
    for (int64_t d = 0; d < size; d++) v[at * size + d] = to_s8(value[d] * by_v);
  }
}

// The same of a head that nothing changes, in the pages' own type.
void copy_kv(const RopeTask& t, int64_t slot, int64_t head, const uint16_t* key, const uint16_t* value) {
  const int64_t at = slot % PAGE, size = t.head_size, base = (slot / PAGE * t.kv_heads + head) * PAGE * size;
  uint32_t* k = (uint32_t*)((uint16_t*)t.k + base) + at;
  uint16_t* v = (uint16_t*)t.v + base + at / 2 * size * 2 + at % 2;
  for (int64_t d = 0; d < size; d += 2) k[d / 2 * PAGE] = read<uint32_t>(key + d);
  for (int64_t d = 0; d < size; d++) v[2 * d] = value[d];
}

template <class T>
void rope_store_token(const RopeTask& t, int64_t token) {
  const int64_t size = t.head_size, half = t.rotated / 2;
  const T* from = (const T*)t.qkv + token * (t.heads + 2 * t.kv_heads) * size;
  const float *cos = t.cos + t.positions[token] * half, *sin = t.sin + t.positions[token] * half;
  float head[LARGEST_HEAD], value[LARGEST_HEAD];
  const bool still_q = !half && !t.q_norm, still_k = !half && !t.k_norm && t.type == t.kv_type && sizeof(T) == 2;
  if (still_q) std::memcpy((T*)t.q + token * t.heads * size, from, t.heads * size * sizeof(T));
  for (int64_t h = still_q ? t.heads : 0; h < t.heads; h++) {
    load_head(from + h * size, head, size);
    norm_head(head, t.q_norm, size, t.eps);
    rotate(head, cos, sin, half);
    T* q = (T*)t.q + (token * t.heads + h) * size;
    for (int64_t d = 0; d < size; d++) set(q + d, head[d]);
  }
  for (int64_t h = 0; h < t.kv_heads; h++) {
    const T *key = from + (t.heads + h) * size, *own = key + t.kv_heads * size;
    if (still_k) {
      copy_kv(t, t.slots[token], h, (const uint16_t*)key, (const uint16_t*)own);
      continue;
    }
    load_head(key, head, size);
    norm_head(head, t.k_norm, size, t.eps);
    rotate(head, cos, sin, half);
    load_head(own, value, size);
    store_kv(t, t.slots[token], h, head, value);
  }
}

void rope_store(const RopeTask& t, int64_t token) {
  if (t.type == Type::f32) rope_store_token<float>(t, token);
  else rope_store_token<uint16_t>(t, token);
}

}  // namespace TW_ISA
