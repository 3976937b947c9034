// Attention over pages, and without a cache.
#include <algorithm>

#include "encoder.h"
#include "harness.h"

namespace levels {

using tw::PAGE;

struct Paged {
  Type kv, q;
  int64_t head_size, context, queries;
  bool causal = true;
  int64_t window = 0;
  float soft_cap = 0;
  bool bias = false, sinks = false, in_parts = false;
};

std::vector<Written> paged(const Kernels& k, const Paged& of) {
  Random random(of.context + of.head_size);
  constexpr int64_t HEADS = 6, KV_HEADS = 2, GROUP = HEADS / KV_HEADS;
  const int64_t used = (of.context + PAGE - 1) / PAGE, pages = used + 3;
  std::vector<int32_t> table(used);
  for (int64_t i = 0; i < used; i++) table[i] = int32_t(pages - 1 - i);
  const int64_t count = pages * KV_HEADS * PAGE * of.head_size, reach = (of.context + 63) / 64 * 64;
  const auto keys = numbers(random, of.kv, count), values = numbers(random, of.kv, count);
  const auto k_scale = random.reals(pages * KV_HEADS * PAGE, 0.02f), v_scale = random.reals(pages * KV_HEADS * PAGE);
  const auto queries = numbers(random, of.q, of.queries * HEADS * of.head_size);
  const auto bias = random.reals(HEADS * 2 * reach), sinks = random.reals(HEADS);
  Written out(of.q, of.queries * HEADS * of.head_size);
  tw::AttentionTask t{};
  t.q = queries.data(), t.q_type = of.q, t.k = keys.data(), t.v = values.data();
  t.k_scale = k_scale.data(), t.v_scale = v_scale.data(), t.kv_type = of.kv, t.table = table.data();
  t.queries = of.queries, t.context = t.last_key = of.context, t.heads = HEADS, t.kv_heads = KV_HEADS;
  t.head_size = of.head_size, t.scale = 0.3f, t.soft_cap = of.soft_cap, t.window = of.window, t.causal = of.causal;
  if (of.bias) t.bias = bias.data(), t.reach = reach;
  if (of.sinks) t.sinks = sinks.data();
  t.out = out.data();
  const int64_t rows = of.queries * GROUP, stretches = (of.context + tw::STRETCH - 1) / tw::STRETCH;
  std::vector<float> sums(stretches * rows * t.sums_size());
  for (t.kv_head = 0; t.kv_head < KV_HEADS; t.kv_head++) {
    if (!of.in_parts) {
      k.attention(t, 0, rows);
      continue;
    }
    for (int64_t i = 0; i < stretches; i++) {
      tw::AttentionTask part = t;
      part.first_key = i * tw::STRETCH, part.last_key = std::min(of.context, (i + 1) * tw::STRETCH);
      part.sums = sums.data() + i * rows * t.sums_size();
      k.attention(part, 0, rows);
    }
    tw::AttentionTask whole = t;
    whole.sums = sums.data();
    k.add_stretches(whole, 0, rows, stretches);
  }
  return {out};
}

enum class Mask { none, seen, added, grid };

std::vector<Written> dense(const Kernels& k, Type type, int64_t head_size, int64_t height, int64_t width, Mask kind) {
  Random random(head_size + width);
  constexpr int64_t HEADS = 2;
  const int64_t tokens = height * width, stride = HEADS * head_size;
  const auto q = numbers(random, type, tokens * stride), key = numbers(random, type, tokens * stride);
  const auto v = numbers(random, type, tokens * stride);
  const auto added = random.reals(tokens * tokens);
  auto seen = random.bytes(tokens * tokens);
  for (uint8_t& x : seen) x &= 1;
  const auto by_row = random.reals(head_size * tw::DenseAttentionTask::table_width(height));
  const auto by_column = random.reals(head_size * tw::DenseAttentionTask::table_width(width));
  Written out(type, tokens * stride);
  tw::DenseAttentionTask t{};
  t.q = {q.data(), 0, head_size, stride}, t.k = {key.data(), 0, head_size, stride};
  t.v = {v.data(), 0, head_size, stride};
  t.type = type, t.out = out.data(), t.queries = t.keys = tokens, t.heads = HEADS, t.head_size = head_size;
  t.scale = 0.3f;
  if (kind == Mask::seen) t.mask = seen.data(), t.mask_is_bool = true, t.mask_query = tokens, t.mask_key = 1;
  if (kind == Mask::added) t.mask = added.data(), t.mask_key = 1;
  if (kind == Mask::grid) t.by_row = by_row.data(), t.by_column = by_column.data(), t.height = height, t.width = width;
  for (int64_t head = 0; head < HEADS; head++) k.dense_attention(t, 0, head, 0, tokens);
  return {out};
}

std::vector<Case> attention_cases() {
  std::vector<Case> all;
  for (const Type kv : {Type::f32, Type::bf16, Type::s8})
    for (const Type q : {Type::f32, Type::bf16})
      for (const int64_t head_size : {48, 128}) {
        std::vector<Paged> some = {{kv, q, head_size, 1, 1}, {kv, q, head_size, 150, 7}, {kv, q, head_size, 1100, 2}};
        some.push_back({.kv = kv, .q = q, .head_size = head_size, .context = 1100, .queries = 1, .in_parts = true});
        some.push_back({.kv = kv, .q = q, .head_size = head_size, .context = 90, .queries = 90, .window = 20});
        some.push_back({.kv = kv, .q = q, .head_size = head_size, .context = 70, .queries = 3, .soft_cap = 2});
        some.push_back({.kv = kv, .q = q, .head_size = head_size, .context = 70, .queries = 5, .causal = false,
                        .bias = true, .sinks = true});
        for (const Paged& of : some)
          all.push_back({"paged attention, context " + std::to_string(of.context), kv == Type::bf16,
                         [=](const Kernels& k) { return paged(k, of); }});
      }
  for (const Type type : {Type::f32, Type::bf16})
    for (const int64_t head_size : {16, 80})
      for (const Mask kind : {Mask::none, Mask::seen, Mask::added, Mask::grid})
        all.push_back({"dense attention", type == Type::bf16,
                       [=](const Kernels& k) { return dense(k, type, head_size, 5, 9, kind); }});
  return all;
}

}  // namespace levels
