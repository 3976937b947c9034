// A mixture of experts in the program: the rows of all chosen experts are multiplied in one round. ops.cpp takes this in.
namespace {

// Rows of one expert, among all rows that experts have, which lie in the order of the experts' numbers.
struct ExpertRows {
  int64_t expert, first, count;
};

// The experts of a step's tokens. A pair is a token and one of its experts.
struct Choice {
  std::vector<ExpertRows> groups;
  std::vector<int64_t> token;      // of each pair
  std::vector<float> share;        // of each pair
  std::vector<int64_t> pairs;      // of each token, in the order of the experts' numbers: `chosen` a token
  std::vector<int64_t> group;      // of each pair

  Choice(const std::vector<int64_t>& expert, const std::vector<float>& shares, int64_t tokens, int64_t chosen,
         int64_t experts)
      : pairs(tokens * chosen) {
    std::vector<int64_t> starts(experts + 1), filled(tokens);
    for (int64_t x : expert) starts[x + 1]++;
    for (int64_t x = 0; x < experts; x++) {
      if (starts[x + 1]) groups.push_back({x, starts[x], starts[x + 1]});
      starts[x + 1] += starts[x];
    }
    token.resize(expert.size()), share.resize(expert.size()), group.resize(expert.size());
    for (int64_t i = 0; i < int64_t(expert.size()); i++) {
      const int64_t pair = starts[expert[i]]++;
      token[pair] = i / chosen, share[pair] = shares[i];
    }
    for (int64_t g = 0; g < int64_t(groups.size()); g++)
      for (int64_t pair = groups[g].first; pair < groups[g].first + groups[g].count; pair++) {
        group[pair] = g;
        pairs[token[pair] * chosen + filled[token[pair]]++] = pair;
      }
  }
};

// One linear layer of each expert over the rows that are its own.
class ExpertProducts {
 public:
  // `layers` are those of the groups; `memory` has room for `room` bytes of each pair.
  ExpertProducts(const Choice& choice, std::vector<const Packed*> layers, Type type, char* memory, int64_t room)
      : choice(choice), layers(std::move(layers)), type(type) {
    for (size_t g = 0; g < choice.groups.size(); g++) {
      check_level(*this->layers[g]);
      const ExpertRows& rows = choice.groups[g];
      tasks.push_back(over_memory(*this->layers[g], type, rows.count, memory + rows.first * room));
    }
  }

  // A pair's row, of the numbers at `x`.
  void make(const tw::Kernels& k, int64_t pair, const char* x) const {
    const int64_t g = choice.group[pair], row = pair - choice.groups[g].first;
    const Packed& layer = *layers[g];
    const tw::LinearTask& task = tasks[g];
    if (layer.integers) k.quantize(x, type, layer.width, 0, quantized(task, row));
    else k.widen_row(x, type, layer.width, 0, (uint16_t*)((char*)task.rows + row * task.row_stride), task.depth, 0);
  }

  // All products, whose rows of `features` numbers lie in the order of the pairs.
  void multiply(char* out, int64_t features) {
    const int64_t groups = tasks.size(), panels = up(features, PANEL) / PANEL, size = type == Type::f32 ? 4 : 2;
    const int64_t pieces = std::min(panels, up(PIECES * threads(), groups) / groups);
    turn();
    each(groups * pieces, [&](int64_t i) {
      const int64_t g = i / pieces, piece = i % pieces;
      tw::LinearTask part = tasks[g];
      part.out = out + choice.groups[g].first * features * size;
      part.row_begin = 0, part.row_end = choice.groups[g].count;
      part.panel_begin = panels * piece / pieces, part.panel_end = panels * (piece + 1) / pieces;
      (kernels().*layers[g]->multiply)(part);
    });
  }

 private:
  // Rows as tiles want them, where there are some.
  void turn() {
    std::vector<int64_t> some;
    for (size_t g = 0; g < tasks.size(); g++)
      if (turned(*layers[g], choice.groups[g].count)) some.push_back(g);
    if (some.empty()) return;
    each(some.size(), [&](int64_t i) {
      const int64_t g = some[i];
      turn_rows(*layers[g], tasks[g], choice.groups[g].count, 0, 1);
    });
    for (int64_t g : some) read_turned(*layers[g], tasks[g], choice.groups[g].count);
  }

  const Choice& choice;
  const std::vector<const Packed*> layers;
  const Type type;
  std::vector<tw::LinearTask> tasks;
};

// Each token's chosen experts, added up in the order of their numbers. Two linear layers of each expert from `first` on:
// gate and value, and the last.
void DecodePlan::experts(const Ints& score_cells, const Ints& x_cells, const Ints& to_cells, int64_t first,
                         int64_t count, const std::string& gate, const optional<Tensor>& bias,
                         const optional<Tensor>& weights, int64_t chosen, bool sigmoid, int64_t groups,
                         int64_t chosen_groups, int64_t ranked, bool normalize, double factor) {
  const Cells scores = dense(score_cells, "scores"), x = dense(x_cells, "the experts' input");
  const Cells to = dense(to_cells, "what experts give");
  TORCH_CHECK_VALUE(count > 0 && scores.width == count && x.width == to.width && first >= 0 &&
                        first + 2 * count <= int64_t(linears.size()),
                    scores.width, " scores of ", count, " experts from linear layer ", first, " of ", linears.size());
  const int64_t model = x.width, inner = linears[first + 1].width;
  int64_t room = 0;
  for (int64_t i = 0; i < count; i++) {
    const Packed &wide = layer(first + 2 * i, model, 2 * inner), &narrow = layer(first + 2 * i + 1, inner, model);
    room = std::max({room, Room::of_each(wide), Room::of_each(narrow)});
  }
  const Routing routing{count,  chosen,    groups,        chosen_groups,                ranked,
                        sigmoid, normalize, float(factor), floats(bias, count, "bias"), floats(weights, count, "weights")};
  routing.check();
  keep(bias), keep(weights);
  const tw::Activation activation = gate_of(gate);
  const int64_t wide_bytes = up(2 * inner * element, 64), narrow_bytes = up(inner * element, 64);
  const int64_t part_bytes = up(model * element, 64);
  push(
      [=, this](const Step& now) {
        const auto& k = kernels();
        const int64_t pairs = now.rows * chosen;
        std::vector<int64_t> expert(pairs);
        std::vector<float> share(pairs), space(now.rows * (count + routing.room()));
        each_row(now.rows, 32 * count, [&](int64_t row) {
          float* own = space.data() + row * (count + routing.room());
          widen_scores(cell(now, scores), type, row, count, own);
          routing.choose(own, own + count, expert.data() + row * chosen, share.data() + row * chosen);
        });
        const Choice choice(expert, share, now.rows, chosen, count);
        std::vector<const Packed*> wide, narrow;
        for (const ExpertRows& group : choice.groups) {
          wide.push_back(&linears[first + 2 * group.expert]);
          narrow.push_back(&linears[first + 2 * group.expert + 1]);
        }
        char *const memory = now.own, *const both = memory + pairs * room, *const product = both + pairs * wide_bytes;
        char* const parts = product + pairs * narrow_bytes;
        ExpertProducts into(choice, std::move(wide), type, memory, room);
        each_row(pairs, model, [&](int64_t pair) { into.make(k, pair, cell(now, x, choice.token[pair])); });
        into.multiply(both, 2 * inner);
        ExpertProducts out(choice, std::move(narrow), type, memory, room);
        each_row(pairs, 5 * inner, [&](int64_t pair) {
          char* mine = product + pair * inner * element;
          k.gated(both + pair * 2 * inner * element, mine, type, inner, 0, activation);
          out.make(k, pair, mine);
        });
        out.multiply(parts, model);
        typed([&](auto* kind) {
          using T = std::remove_pointer_t<decltype(kind)>;
          each_row(now.rows, chosen * model, [&](int64_t row) {
            T* sum = (T*)cell(now, to, row);
            std::fill(sum, sum + model, T(0.0f));
            for (int64_t c = 0; c < chosen; c++) {
              const int64_t pair = choice.pairs[row * chosen + c];
              const float by = float(T(choice.share[pair]));
              const T* part = (const T*)(parts + pair * model * element);
              for (int64_t i = 0; i < model; i++) sum[i] = T(float(sum[i]) + float(T(float(part[i]) * by)));
            }
          });
        });
      },
      [=](const Step& now) { return now.rows * chosen * (room + wide_bytes + narrow_bytes + part_bytes); });
}

}  // namespace
