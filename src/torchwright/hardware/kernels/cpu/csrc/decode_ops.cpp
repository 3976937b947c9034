// A whole step of a decoder as one operator, from token ids to logits, with one team of threads for its length.
//
// It computes with the operators' own kernels, in their order, so that its results are theirs to the bit. ops.cpp takes
// this in, whose helpers it uses.
namespace {

void DecodePlan::room(int64_t number, int64_t width) {
  TORCH_CHECK_VALUE(number >= 0 && number <= int64_t(widths.size()) && width > 0, "room ", number, " of ", width,
                    " numbers does not follow ", widths.size(), " rooms");
  if (number == int64_t(widths.size())) widths.push_back(width);
  else widths[number] = std::max(widths[number], width);
}

Cells DecodePlan::cells(const Ints& numbers) const {
  TORCH_CHECK_VALUE(numbers.size() == 4, "cells are (room, first, width, stride)");
  const Cells found{numbers[0], numbers[1], numbers[2], numbers[3]};
  TORCH_CHECK_VALUE(found.room >= 0 && found.room < int64_t(widths.size()) && found.first >= 0 && found.width > 0 &&
                        found.first + found.width <= found.stride && found.stride <= widths[found.room],
                    "there is no room for ", found.width, " numbers from ", found.first, " on, of ", found.stride);
  return found;
}

Cells DecodePlan::dense(const Ints& numbers, const char* what) const {
  const Cells found = cells(numbers);
  TORCH_CHECK_VALUE(found.dense(), what, " is ", found.width, " of ", found.stride, " numbers; whole rows are wanted");
  return found;
}

int64_t DecodePlan::add_linear(const Tensor& weight, const optional<Tensor>& weight_scale, const optional<Tensor>& bias,
                               int64_t width, int64_t features, int64_t group, int64_t bits, int64_t digits,
                               bool floats, int64_t layout) {
  if (weight_scale) {
    if (group) check_group(group);
    linears.push_back(packed_integers(weight, *weight_scale, bias, width, features, group, digits));
  } else {
    TORCH_CHECK_VALUE(group || !layout, "weights in bfloat16 have no groups, and so one layout");
    const Layout found = group ? layout_of(layout, group, bits, floats) : Layout::lanes;
    linears.push_back(packed_wide(weight, bias, width, features, group, group ? bits : 16, floats, found));
  }
  keep(weight), keep(weight_scale), keep(bias);
  return int64_t(linears.size()) - 1;
}

void DecodePlan::read_as(const Ints& tokens, int64_t other) { aliased = tokens, alias = other; }

void DecodePlan::note(int64_t layer, const Ints& from_cells) {
  const Cells from = dense(from_cells, "a layer's input");
  noted.push_back(layer);
  push([=, this](const Step& now) {
    if (!now.features) return;
    const int64_t bytes = from.width * element, wide = int64_t(observed.size()) * bytes;
    for (size_t place = 0; place < observed.size(); place++)
      for (int64_t row = 0; observed[place] == layer && row < now.rows; row++)
        std::memcpy(now.features + row * wide + int64_t(place) * bytes, cell(now, from, row), bytes);
  });
}

void DecodePlan::observe(const Ints& wanted) {
  for (int64_t layer : wanted)
    TORCH_CHECK_VALUE(std::find(noted.begin(), noted.end(), layer) != noted.end(), "there is no layer ", layer,
                      " to observe");
  observed = wanted;
}

void DecodePlan::finish(const Ints& from, const optional<int64_t>& linear) {
  result = dense(from, "what the program leaves");
  TORCH_CHECK_VALUE(widths.size() > 1 && std::min(widths[0], widths[1]) >= result->width,
                    "the first two rooms are narrower than the ", result->width, " numbers that the program leaves");
  if (linear) {
    TORCH_CHECK_INDEX(*linear >= 0 && *linear < int64_t(linears.size()), "there is no linear layer ", *linear);
    layer(*linear, result->width, linears[*linear].task.features);
  }
  head = linear;
}

// Tokens as the tables have them.
void DecodePlan::read_tokens(Step& now) const {
  for (int64_t& token : now.tokens)
    if (std::find(aliased.begin(), aliased.end(), token) != aliased.end()) token = alias;
  for (int64_t token : now.tokens)
    TORCH_CHECK_INDEX(token >= 0 && token < vocabulary, "token ", token, " is beyond the ", vocabulary,
                      " of the embedding");
}

void DecodePlan::check_turns(const Step& now) const {
  for (const Turn& turn : turned) {
    TORCH_CHECK_VALUE(turn.number < int64_t(now.turns.size()), "there is no turn ", turn.number);
    TORCH_CHECK_VALUE(now.turns[turn.number].rotated <= turn.head_size, "turn ", turn.number, " is of ",
                      now.turns[turn.number].rotated, " numbers, and heads have ", turn.head_size);
  }
}

// Tokens, and where they turn to.
void DecodePlan::read_batch(Step& now, const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots) const {
  const int64_t* tokens = integers<int64_t>(ids, now.rows, "ids");
  now.tokens.assign(tokens, tokens + now.rows);
  read_tokens(now);
  for (size_t i = 0; i + 2 < turns.size(); i += 3)
    now.turns.push_back(
        rope_task(turns[i], turns[i + 1], turns[i + 2], slots, now.rows, tw::LARGEST_HEAD, page_count));
  check_turns(now);
  if (place_count < 0) return;
  TORCH_CHECK_VALUE(!now.turns.empty(), "a step without turns has no positions");
  for (int64_t row = 0; row < now.rows; row++)
    TORCH_CHECK_INDEX(now.turns[0].positions[row] < place_count, "position ", now.turns[0].positions[row],
                      " is beyond the ", place_count);
}

void DecodePlan::read_states(Step& now, const Tensor& query_starts, const std::vector<Tensor>& states) const {
  TORCH_CHECK_VALUE(states.size() == (state_count < 0 ? 0 : 3), states.size(),
                    " tensors of states; slots, and rows and slots of copies are wanted where layers have states");
  if (states.empty()) return;
  TORCH_CHECK_VALUE(states[0].numel() == now.sequences.count, states[0].numel(), " states of ", now.sequences.count,
                    " sequences");
  now.states = state_rows(query_starts, states[0], states[1], states[2], now.rows, state_count);
}

void DecodePlan::read_features(Step& now, const Features& features) const {
  if (!features) return;
  TORCH_CHECK_VALUE(float_type(*features, "features") == type && features->is_contiguous() && features->dim() == 2 &&
                        features->size(0) == now.rows && !observed.empty() &&
                        features->size(1) == int64_t(observed.size()) * result->width,
                    "features of shape ", features->sizes(), " are not contiguous rows of ", observed.size(),
                    " observed layers");
  now.features = (char*)features->mutable_data_ptr();
}

// Gives every room its memory, and the operations theirs.
void DecodePlan::place(Step& now) {
  int64_t all = 0, own = 0;
  for (int64_t width : widths) {
    now.offsets.push_back(all);
    all += up(now.rows * width * element, 64);
  }
  for (const Operation& operation : program)
    if (operation.bytes) own = std::max(own, operation.bytes(now));
  if (head) own = std::max(own, Room(linears[*head], now.rows).bytes);
  if (!memory.defined() || memory.numel() < all + own) memory = at::empty({all + own}, at::kByte);
  now.rooms = (char*)memory.mutable_data_ptr();
  now.own = now.rooms + all;
}

// Run the whole program over a batch that has been read, and then `end`.
template <class End>
void DecodePlan::compute(Step& now, const End& end) {
  TORCH_CHECK_VALUE(!given || now.given, "a draft's step is given nothing");
  for (const tw::AttentionTask& task : biased) check_reach(task, now.sequences);
  if (!now.rows) return;
  for (const Kind& kind : kinds)
    now.pieces.emplace_back(kind.remembers ? *now.remembered : now.sequences, kind.group, kind.kv_heads,
                            kind.sums_size);
  place(now);
  const tw::Pool::Team team(own);
  for (const Operation& operation : program) operation.run(now);
  end(now);
}

// Read a batch and run the whole program over it, and then `end`.
template <class End>
void DecodePlan::run(const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots,
                     const Tensor& block_tables, const Tensor& query_starts, const Tensor& context_lens,
                     const std::vector<Tensor>& memories, const std::vector<Tensor>& states, const Adapted& adapted,
                     const Features& features, const End& end) {
  RECORD_FUNCTION("torchwright::decode_step", std::vector<c10::IValue>({ids}));
  TORCH_CHECK_VALUE(result && !turned.empty() && vocabulary >= 0, "a plan of ", turned.size(),
                    " layers with attention cannot run, or one without an embedding or an end");
  const int64_t rows = ids.numel();
  Step now{rows, Sequences(block_tables, query_starts, context_lens, rows, page_count)};
  read_batch(now, ids, turns, slots);
  read_states(now, query_starts, states);
  read_features(now, features);
  TORCH_CHECK_VALUE(memories.size() == (memory_pages < 0 ? 0 : 2), memories.size(),
                    " tensors of a memory; pages and lengths are wanted where layers have one");
  TORCH_CHECK_VALUE(!adapted || (type == Type::bf16 && memory_pages < 0),
                    "adapters are for a stream in bfloat16 and layers without a memory");
  if (adapted) now.adapted = adapted->get();
  if (!memories.empty()) now.remembered.emplace(memories[0], query_starts, memories[1], rows, memory_pages, false);
  compute(now, end);
}

Tensor DecodePlan::hidden(const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots,
                          const Tensor& block_tables, const Tensor& query_starts, const Tensor& context_lens,
                          const std::vector<Tensor>& memories, const std::vector<Tensor>& states,
                          const Adapted& adapted, const Features& features) {
  TORCH_CHECK_VALUE(result, "a plan of 0 layers cannot run, or one without an end");
  Tensor out = at::empty({ids.numel(), result->width}, options);
  run(ids, turns, slots, block_tables, query_starts, context_lens, memories, states, adapted, features,
      [&](const Step& now) { std::memcpy(out.mutable_data_ptr(), cell(now, *result), out.nbytes()); });
  return out;
}

std::tuple<Tensor, Tensor> DecodePlan::logits(const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots,
                                              const Tensor& block_tables, const Tensor& query_starts,
                                              const Tensor& context_lens, const std::vector<Tensor>& memories,
                                              const std::vector<Tensor>& states, const Adapted& adapted,
                                              const Features& features, const Tensor& rows) {
  TORCH_CHECK_VALUE(result && head, "there is no output layer");
  const int64_t count = rows.numel(), width = linears[*head].task.features, panels = up(width, PANEL) / PANEL;
  const int64_t* wanted = integers<int64_t>(rows, count, "rows");
  TORCH_CHECK_VALUE(count <= ids.numel(), count, " rows of ", ids.numel(), " are asked for");
  for (int64_t i = 0; i < count; i++)
    TORCH_CHECK_INDEX(wanted[i] >= 0 && wanted[i] < ids.numel(), "row ", wanted[i], " is beyond the ", ids.numel());
  const auto floats = options.dtype(at::kFloat);
  const Tensor out = at::empty({count, width}, floats), peaks = at::empty({count, panels}, floats);
  run(ids, turns, slots, block_tables, query_starts, context_lens, memories, states, adapted, features,
      [&](const Step& now) {
        if (!count) return;
        // The rows that are wanted lie in a room that nothing else needs any more.
        const int64_t bytes = result->width * element;
        char* const chosen = now.rooms + now.offsets[result->room == 0 ? 1 : 0];
        for (int64_t i = 0; i < count; i++) std::memcpy(chosen + i * bytes, cell(now, *result, wanted[i]), bytes);
        answer(now, chosen, count, out.mutable_data_ptr<float>(), peaks.mutable_data_ptr<float>());
      });
  return {out, peaks};
}

// Logits of `count` rows that are normalized, and their peaks. A piece's numbers in bfloat16 lie in the last half of
// the place of its floats, so that they need no memory of their own.
void DecodePlan::answer(const Step& now, const char* x, int64_t count, float* out, float* peaks) const {
  const auto& k = kernels();
  const Packed& last = linears[*head];
  const int64_t features = last.task.features, panels = up(features, PANEL) / PANEL;
  const bool wide = type == Type::f32;
  over_blocks(with_rows(last, x, type, count, now.own, about_zero), count, panels, [&](tw::LinearTask part) {
    const int64_t end = std::min(part.panel_end * PANEL, features);
    part.out = wide ? (char*)out : (char*)out + 2 * end;
    part.out_stride = wide ? features : 2 * features;
    (k.*last.multiply)(part);
    for (int64_t row = part.row_begin; row < part.row_end; row++)
      for (int64_t panel = part.panel_begin; panel < part.panel_end; panel++) {
        const int64_t at = panel * PANEL;
        const char* from = (const char*)part.out + (row * part.out_stride + at) * (wide ? 4 : 2);
        peaks[row * panels + panel] = k.widen_peak(from, type, out + row * features + at, std::min(PANEL, end - at));
      }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.class_<DecodePlan>("DecodePlan")
      .def(torch::init<const Tensor&>())
      .def("room", &DecodePlan::room)
      .def("add_linear", &DecodePlan::add_linear)
      .def("read_as", &DecodePlan::read_as)
      .def("lookup", &DecodePlan::lookup)
      .def("places", &DecodePlan::places)
      .def("copy", &DecodePlan::copy)
      .def("add", &DecodePlan::add)
      .def("multiply", &DecodePlan::multiply)
      .def("scale", &DecodePlan::scale)
      .def("scale_by", &DecodePlan::scale_by)
      .def("clamp", &DecodePlan::clamp)
      .def("norm", &DecodePlan::norm)
      .def("join", &DecodePlan::join)
      .def("gated", &DecodePlan::gated)
      .def("activate", &DecodePlan::activate)
      .def("linear", &DecodePlan::linear)
      .def("heads", &DecodePlan::heads)
      .def("store", &DecodePlan::store)
      .def("attend", &DecodePlan::attend)
      .def("short_conv", &DecodePlan::short_conv)
      .def("gated_delta", &DecodePlan::gated_delta)
      .def("selective_scan", &DecodePlan::selective_scan)
      .def("gated_norm", &DecodePlan::gated_norm)
      .def("experts", &DecodePlan::experts)
      .def("note", &DecodePlan::note)
      .def("finish", &DecodePlan::finish)
      .def("observe", &DecodePlan::observe)
      .def("hidden", &DecodePlan::hidden)
      .def("logits", &DecodePlan::logits)
      .def("receive", &DecodePlan::receive)
      .def("carry", &DecodePlan::carry)
      .def("follow", &DecodePlan::follow)
      .def("grow", &DecodePlan::grow)
      .def("scratch", &DecodePlan::scratch);
}
