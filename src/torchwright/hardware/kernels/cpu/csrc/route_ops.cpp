// The choice of experts as an operator. ops.cpp takes this in, whose helpers it uses.
#include <cmath>
#include <limits>

namespace {

// How a token's experts follow from the router's scores; `reference.route` says the same in PyTorch.
struct Routing {
  int64_t experts, chosen, groups, chosen_groups, ranked;
  bool sigmoid, normalize;
  float factor;
  const float *bias, *weights;  // (experts,) each, or null

  void check() const {
    TORCH_CHECK_VALUE(experts > 0 && groups > 0 && experts % groups == 0 && chosen_groups > 0 &&
                          chosen_groups <= groups && (ranked == 1 || ranked == 2) && chosen > 0 &&
                          chosen <= experts / groups * chosen_groups,
                      chosen, " of ", experts, " experts cannot be chosen, in ", chosen_groups, " of ", groups,
                      " groups by the ", ranked, " best of each");
  }

  // Floats that one token's choice takes: shares, ranks, and those of groups.
  int64_t room() const { return 2 * experts + groups; }

  // The chosen experts, best first, the first of equals before others, and the share of each.
  void choose(const float* scores, float* room, int64_t* expert, float* share) const {
    float *const shares = room, *const ranks = room + experts, *const sums = ranks + experts;
    shares_of(scores, shares);
    for (int64_t x = 0; x < experts; x++) ranks[x] = shares[x] + (bias ? bias[x] : 0);
    if (chosen_groups < groups) hide_groups(ranks, sums);
    float sum = 0;
    for (int64_t c = 0; c < chosen; c++) {
      expert[c] = take_largest(ranks, experts);
      sum += share[c] = shares[expert[c]];
    }
    for (int64_t c = 0; c < chosen; c++) {
      if (normalize) share[c] /= sum;
      share[c] *= factor;
      if (weights) share[c] *= weights[expert[c]];
    }
  }

 private:
  static constexpr float TAKEN = -std::numeric_limits<float>::infinity();

  void shares_of(const float* scores, float* shares) const {
    if (sigmoid) {
      for (int64_t x = 0; x < experts; x++) shares[x] = 1 / (1 + std::exp(-scores[x]));
      return;
    }
    float top = scores[0], sum = 0;
    for (int64_t x = 1; x < experts; x++) top = std::max(top, scores[x]);
    for (int64_t x = 0; x < experts; x++) sum += shares[x] = std::exp(scores[x] - top);
    for (int64_t x = 0; x < experts; x++) shares[x] /= sum;
  }

  // The place of the largest, which is hidden from then on. A NaN is larger than nothing and not replaced, so that some
  // place is always found.
  static int64_t take_largest(float* values, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
      if (values[i] > values[best]) best = i;
    values[best] = TAKEN;
    return best;
  }

  // Hides the experts of all groups but those with the largest sums of ranks.
  void hide_groups(float* ranks, float* sums) const {
    const int64_t size = experts / groups;
    for (int64_t g = 0; g < groups; g++) {
      float best[2] = {TAKEN, TAKEN};
      for (int64_t i = 0; i < size; i++) {
        const float rank = ranks[g * size + i];
        if (rank > best[0]) best[1] = best[0], best[0] = rank;
        else if (rank > best[1]) best[1] = rank;
      }
      sums[g] = ranked == 1 || size == 1 ? best[0] : best[0] + best[1];
    }
    for (int64_t kept = 0; kept < groups - chosen_groups; kept++) {
      // The worst of those left, the last of equals first, as the best are chosen the other way round.
      int64_t worst = -1;
      for (int64_t g = 0; g < groups; g++)
        if (sums[g] < std::numeric_limits<float>::infinity() && (worst < 0 || sums[g] <= sums[worst])) worst = g;
      if (worst < 0) return;
      sums[worst] = std::numeric_limits<float>::infinity();
      for (int64_t i = 0; i < size; i++) ranks[worst * size + i] = TAKEN;
    }
  }
};

// One token's scores as float32.
void widen_scores(const void* scores, Type type, int64_t token, int64_t experts, float* to) {
  for (int64_t x = 0; x < experts; x++)
    to[x] = type == Type::f32 ? ((const float*)scores)[token * experts + x]
                              : float(((const c10::BFloat16*)scores)[token * experts + x]);
}

std::tuple<Tensor, Tensor> route(const Tensor& scores_in, const optional<Tensor>& bias, const optional<Tensor>& weights,
                                 int64_t chosen, bool sigmoid, int64_t groups, int64_t chosen_groups, int64_t ranked,
                                 bool normalize, double factor) {
  const Tensor scores = scores_in.contiguous();
  TORCH_CHECK_VALUE(scores.dim() == 2, "scores of shape ", scores.sizes(), " are not (tokens, experts)");
  const int64_t tokens = scores.size(0), count = scores.size(1);
  const Type type = float_type(scores, "scores");
  const Routing routing{count,         chosen,    groups,
                        chosen_groups, ranked,    sigmoid,
                        normalize,     float(factor), floats(bias, count, "bias"),
                        floats(weights, count, "weights")};
  routing.check();
  Tensor experts = at::empty({tokens, chosen}, scores.options().dtype(at::kLong));
  Tensor shares = at::empty({tokens, chosen}, scores.options().dtype(at::kFloat));
  std::vector<float> room(count + routing.room());
  for (int64_t token = 0; token < tokens; token++) {
    widen_scores(scores.const_data_ptr(), type, token, count, room.data());
    routing.choose(room.data(), room.data() + count, experts.mutable_data_ptr<int64_t>() + token * chosen,
                   shares.mutable_data_ptr<float>() + token * chosen);
  }
  return {experts, shares};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.def(
      "route(Tensor scores, Tensor? bias, Tensor? weights, int chosen, bool sigmoid, int groups, int chosen_groups, "
      "int ranked, bool normalize, float factor) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(torchwright, CPU, m) { m.impl("route", route); }
