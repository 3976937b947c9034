// A draft's calls as programs: what it makes of a step's tokens, and chains of its own proposals. ops.cpp takes this in,
// whose helpers it uses.
namespace {

// How each of some sequences chooses: rows of (temperature, top_k, top_p, min_p), and a key for each place ahead.
class Choices {
 public:
  Choices(const Tensor& options, const Tensor& keys, int64_t count) {
    TORCH_CHECK_VALUE(keys.dim() == 2 && keys.size(0) == count, "keys of shape ", keys.sizes(), " are not those of ",
                      count, " sequences");
    depth = keys.size(1);
    TORCH_CHECK_VALUE(options.scalar_type() == at::kDouble && options.is_contiguous() && options.numel() == 4 * count,
                      "options of shape ", options.sizes(), " are not contiguous float64 of ", count, " sequences");
    values = options.const_data_ptr<double>();
    numbers = integers<int64_t>(keys, count * depth, "keys");
  }

  tw::Choice at(int64_t sequence, int64_t ahead) const {
    const double* of = values + 4 * sequence;
    return {of[0], int64_t(of[1]), of[2], of[3], uint64_t(numbers[sequence * depth + ahead])};
  }

  int64_t depth;

 private:
  const double* values;
  const int64_t* numbers;
};

const double* doubles(const Tensor& x, int64_t count, const char* what) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kDouble && x.is_contiguous() && x.numel() == count, what,
                    " must be a contiguous float64 tensor of ", count, " values; it has ", x.numel(), " of ",
                    x.scalar_type());
  return x.const_data_ptr<double>();
}

void DecodePlan::receive(const Ints& to_cells) {
  const Cells to = dense(to_cells, "what a step is given");
  given = to.width;
  push([=, this](const Step& now) { std::memcpy(cell(now, to), now.given, now.rows * to.width * element); });
}

void DecodePlan::carry(const Ints& from_cells, const Tensor& ids) {
  carried = dense(from_cells, "what the next step is given");
  TORCH_CHECK_VALUE(head && !turned.empty() && vocabulary >= 0,
                    "a draft has an embedding, a layer with attention and an output layer");
  proposed = integers<int64_t>(ids, linears[*head].task.features, "ids");
  keep(ids);
}

// The rows that a step is given.
const char* DecodePlan::read_given(const Tensor& rows, int64_t count) const {
  TORCH_CHECK_VALUE(carried, "this is no plan of a draft");
  if (!given) return nullptr;
  TORCH_CHECK_VALUE(float_type(rows, "what a step is given") == type && rows.is_contiguous() && rows.dim() == 2 &&
                        rows.size(0) == count && rows.size(1) == given,
                    "a step of ", count, " tokens is given rows of shape ", rows.sizes(), "; ", given,
                    " numbers for each are wanted");
  return (const char*)rows.const_data_ptr();
}

// What the next step is given of `count` rows, to `states`, and the proposal of each.
template <class Of>
void DecodePlan::guess(const Step& now, int64_t count, const Of& row_of, const Choices& choices, int64_t ahead,
                       tw::Guesser& guesser, const std::function<void(int64_t, const char*, const tw::Guess&)>& take) {
  if (!count) return;
  const int64_t bytes = result->width * element, kept = carried->width * element;
  const int64_t features = linears[*head].task.features, panels = up(features, PANEL) / PANEL;
  // Neither lies in a room that the chosen rows overwrite: the stream may be what is carried.
  std::vector<char> states(count * kept);
  for (int64_t i = 0; i < count; i++)
    std::memcpy(states.data() + i * kept, cell(now, *carried, row_of(i).first), kept);
  char* const chosen = now.rooms + now.offsets[result->room == 0 ? 1 : 0];
  for (int64_t i = 0; i < count; i++) std::memcpy(chosen + i * bytes, cell(now, *result, row_of(i).first), bytes);
  scores.resize(std::max(scores.size(), size_t(count * (features + panels))));
  float* const peaks = scores.data() + count * features;
  answer(now, chosen, count, scores.data(), peaks);
  for (int64_t i = 0; i < count; i++) {
    const tw::Choice choice = choices.at(row_of(i).second, ahead);
    take(i, states.data() + i * kept, guesser(scores.data() + i * features, peaks + i * panels, choice));
  }
}

std::tuple<Tensor, Tensor, Tensor> DecodePlan::follow(const Tensor& ids, const std::vector<Tensor>& turns,
                                                      const Tensor& slots, const Tensor& block_tables,
                                                      const Tensor& query_starts, const Tensor& context_lens,
                                                      const Tensor& rows_given, const Tensor& rows,
                                                      const Tensor& choice, const Tensor& keys, int64_t drawn_from) {
  const int64_t count = rows.numel();
  const int64_t* wanted = integers<int64_t>(rows, count, "rows");
  for (int64_t i = 0; i < count; i++)
    TORCH_CHECK_INDEX(wanted[i] >= 0 && wanted[i] < ids.numel(), "row ", wanted[i], " is beyond the ", ids.numel());
  TORCH_CHECK_VALUE(count <= ids.numel() && drawn_from > 0, count, " rows of ", ids.numel(), " are asked for");
  const Choices choices(choice, keys, count);
  TORCH_CHECK_VALUE(choices.depth == 1 || !count, "one key a row is wanted");
  Step now{ids.numel(), Sequences(block_tables, query_starts, context_lens, ids.numel(), page_count)};
  read_batch(now, ids, turns, slots);
  now.given = read_given(rows_given, now.rows);
  const Tensor states = at::empty({count, carried->width}, options), tokens = at::empty({count}, at::kLong),
               confidence = at::empty({count}, at::kDouble);
  tw::Guesser guesser(proposed, linears[*head].task.features, drawn_from);
  compute(now, [&](const Step& now) {
    guess(now, count, [&](int64_t i) { return std::pair(wanted[i], i); }, choices, 0, guesser,
          [&](int64_t i, const char* state, const tw::Guess& found) {
            const int64_t bytes = carried->width * element;
            std::memcpy((char*)states.mutable_data_ptr() + i * bytes, state, bytes);
            tokens.mutable_data_ptr<int64_t>()[i] = proposed[found.place];
            confidence.mutable_data_ptr<double>()[i] = found.confidence;
          });
  });
  return {states, tokens, confidence};
}

// A chain as it grows.
struct DecodePlan::Chain {
  int64_t sequence, token;
  double reach;  // the probability that the whole chain is accepted
};

std::tuple<Tensor, Tensor> DecodePlan::grow(const Tensor& ids, const Tensor& states, const Tensor& cos,
                                            const Tensor& sin, const Tensor& places, const Tensor& tables,
                                            const Tensor& choice, const Tensor& keys, const Tensor& most,
                                            const Tensor& reach, const Tensor& acceptance, const Tensor& call,
                                            double tokens_before, double seconds_before, double row,
                                            int64_t drawn_from) {
  const int64_t count = ids.numel();
  TORCH_CHECK_VALUE(count > 0 && drawn_from > 0 && tables.dim() == 2 && tables.size(0) == count && acceptance.dim() == 2 &&
                        acceptance.size(0) == 2 && acceptance.size(1) > 1,
                    "chains of ", count, " sequences do not fit tables of ", tables.sizes(), " and acceptances of ",
                    acceptance.sizes());
  const Choices choices(choice, keys, count);
  const int64_t width = tables.size(1), classes = acceptance.size(1) - 1;
  const int64_t *first = integers<int64_t>(ids, count, "ids"), *begin = integers<int64_t>(places, count, "places");
  const int64_t* longest = integers<int64_t>(most, count, "most");
  const int32_t* pages = integers<int32_t>(tables, count * width, "tables");
  const double *reached = doubles(reach, count, "reach"), *calls = doubles(call, count + 1, "call");
  const double* accepted = doubles(acceptance, 2 * (classes + 1), "acceptance");
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.sizes() == sin.sizes(), "cos and sin must be (positions, rotated / 2)");
  const float *cosines = floats(cos, cos.numel(), "cos"), *sines = floats(sin, sin.numel(), "sin");
  const int64_t bytes = carried ? carried->width * element : 0, deepest = choices.depth;
  const char* start = read_given(states, count);
  TORCH_CHECK_VALUE(!given || given == carried->width, "a step carries ", bytes / element, " numbers, and is given ", given);
  for (int64_t b = 0; b < count; b++)
    TORCH_CHECK_INDEX(longest[b] >= 0 && longest[b] <= deepest && begin[b] >= 0 &&
                          begin[b] + longest[b] <= std::min(cos.size(0), width * PAGE),
                      "a chain of ", longest[b], " tokens from ", begin[b], " on is beyond ", deepest, " keys, ",
                      cos.size(0), " positions or ", width, " pages");

  const Tensor tokens = at::empty({count, deepest}, at::kLong), confidence = at::empty({count, deepest}, at::kDouble);
  int64_t* const out = tokens.mutable_data_ptr<int64_t>();
  double* const sure = confidence.mutable_data_ptr<double>();
  std::fill_n(out, count * deepest, -1), std::fill_n(sure, count * deepest, 0.0);
  std::vector<Chain> chains;
  for (int64_t b = 0; b < count; b++) chains.push_back({b, first[b], reached[b]});
  std::vector<char> now_given(count * bytes), next_given(count * bytes);
  if (given) std::memcpy(now_given.data(), start, now_given.size());
  std::vector<int32_t> block_tables(count * width), starts(count + 1), contexts(count);
  for (int64_t b = 0; b <= count; b++) starts[b] = int32_t(b);
  std::vector<int64_t> at(count), slots(count);
  tw::Guesser guesser(proposed, linears[*head].task.features, drawn_from);
  const tw::Pool::Team team(own);

  // Chains that go on move to the front, with what the next step is given of them.
  const auto keep_if = [&](const auto& goes_on) {
    int64_t kept = 0;
    for (size_t i = 0; i < chains.size(); i++) {
      if (!goes_on(chains[i])) continue;
      if (int64_t(i) != kept) std::memcpy(now_given.data() + kept * bytes, now_given.data() + i * bytes, bytes);
      chains[kept++] = chains[i];
    }
    chains.resize(kept);
  };
  const auto of = [&](const Chain& chain) {
    return accepted + (choices.at(chain.sequence, 0).temperature > 0) * (classes + 1);
  };
  for (int64_t ahead = 0; ahead < deepest; ahead++) {
    keep_if([&](const Chain& chain) { return longest[chain.sequence] > ahead; });
    double gain = 0;
    for (const Chain& chain : chains) gain += chain.reach * of(chain)[classes];
    const int64_t rows = int64_t(chains.size());
    if (!rows || gain * seconds_before <= calls[rows] * tokens_before) break;
    tokens_before += gain, seconds_before += calls[rows];
    for (int64_t i = 0; i < rows; i++) {
      const int64_t b = chains[i].sequence;
      at[i] = begin[b] + ahead;
      contexts[i] = int32_t(at[i]) + 1;
      std::copy_n(pages + b * width, width, block_tables.data() + i * width);
      slots[i] = pages[b * width + at[i] / PAGE] * PAGE + at[i] % PAGE;
    }
    Step now{rows, Sequences(rows, width, block_tables.data(), starts.data(), contexts.data(), rows, page_count)};
    for (const Chain& chain : chains) now.tokens.push_back(chain.token);
    read_tokens(now);
    tw::RopeTask turn{};
    turn.cos = cosines, turn.sin = sines, turn.rotated = 2 * cos.size(1);
    turn.positions = at.data(), turn.slots = slots.data();
    now.turns.push_back(turn);
    check_turns(now);
    now.given = now_given.data();
    compute(now, [&](const Step& now) {
      guess(now, rows, [&](int64_t i) { return std::pair(i, chains[i].sequence); }, choices, ahead, guesser,
            [&](int64_t i, const char* state, const tw::Guess& found) {
              Chain& chain = chains[i];
              std::memcpy(next_given.data() + i * bytes, state, bytes);
              chain.token = proposed[found.place];
              const int64_t place = std::clamp<int64_t>(int64_t(found.confidence * double(classes)), 0, classes - 1);
              chain.reach *= of(chain)[place];
              out[chain.sequence * deepest + ahead] = chain.token;
              sure[chain.sequence * deepest + ahead] = found.confidence;
            });
    });
    std::swap(now_given, next_given);
    keep_if([&](const Chain& chain) { return chain.reach > row; });
  }
  return {tokens, confidence};
}

}  // namespace
