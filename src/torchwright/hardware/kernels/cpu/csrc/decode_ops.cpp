// A whole step of a decoder as one operator, from token ids to logits, with one team of threads for its length.
//
// It computes with the operators' own kernels, in their order, so that its results are theirs to the bit. ops.cpp takes
// this in, whose helpers it uses.
#include <ATen/record_function.h>
#include <torch/custom_class.h>

namespace {

using Adapted = optional<c10::intrusive_ptr<AdaptedRows>>;
using Features = optional<Tensor>;

// What is the same in every step over one cache: weights, pages, sizes, and the memory that steps compute in.
class DecodePlan : public torch::CustomClassHolder {
 public:
  // `gated` is whether the feed-forward blocks have a gate, which the activation is of.
  DecodePlan(int64_t heads, double scale, double soft_cap, const std::string& activation, bool gated, double eps,
             const Tensor& final_norm)
      : heads(heads),
        model(final_norm.numel()),
        scale(scale),
        soft_cap(soft_cap),
        activation(activation_of(activation)),
        gated(gated),
        eps(float(eps)) {
    TORCH_CHECK_VALUE(!gated || activation == "silu" || activation == "gelu_tanh", "activation is ", activation,
                      "; of a gate silu or gelu_tanh is wanted");
    norm = floats(kept(final_norm), model, "the final norm");
  }

  // One of a layer's four, in the order qkv, o, gate_up (or up), down, before `add_layer`; the query and the output of
  // its attention to a memory, before `add_memory`; or the output layer, after all.
  void add_linear(const Tensor& weight, const optional<Tensor>& weight_scale, const optional<Tensor>& bias,
                  int64_t width, int64_t features, int64_t group, int64_t bits, int64_t digits, bool floats) {
    if (weight_scale) {
      if (group) check_group(group);
      linears.push_back(packed_integers(weight, *weight_scale, bias, width, features, group, digits));
    } else {
      if (group) check_kept(group, bits);
      linears.push_back(packed_wide(weight, bias, width, features, group, group ? bits : 16, floats));
    }
    for (const optional<Tensor>& tensor : {optional(weight), weight_scale, bias}) kept(tensor);
  }

  // Around the last four linear layers. `turn` is a place in the turns of a step; norms after a block, those of heads,
  // and the bias of scores may be none.
  void add_layer(const Tensor& pre_attention, const optional<Tensor>& post_attention, const Tensor& pre_mlp,
                 const optional<Tensor>& post_mlp, const optional<Tensor>& q_norm, const optional<Tensor>& k_norm,
                 const Tensor& k, const Tensor& v, const optional<Tensor>& k_scale, const optional<Tensor>& v_scale,
                 int64_t turn, int64_t window, const optional<Tensor>& bias) {
    const Pages pages(k, v, k_scale, v_scale);
    Layer layer{};
    layer.turn = turn;
    layer.pre_attention = floats(pre_attention, model, "pre_attention");
    layer.post_attention = floats(post_attention, model, "post_attention");
    layer.pre_mlp = floats(pre_mlp, model, "pre_mlp");
    layer.post_mlp = floats(post_mlp, model, "post_mlp");
    layer.attention = attention_task(pages, heads, scale, window, soft_cap, true, bias);
    layer.first = layers.empty() ? 0 : layers.back().end;
    layer.end = layer.first + 4;
    pages.into(layer.rope);
    layer.rope.heads = heads;
    layer.rope.q_norm = floats(q_norm, pages.head_size, "q_norm");
    layer.rope.k_norm = floats(k_norm, pages.head_size, "k_norm");
    layer.rope.eps = eps;
    for (const optional<Tensor>& tensor : {optional(pre_attention), post_attention, optional(pre_mlp), post_mlp, q_norm,
                                           k_norm, optional(k), optional(v), k_scale, v_scale, bias})
      kept(tensor);
    TORCH_CHECK_VALUE(int64_t(linears.size()) == layer.end && turn >= 0 && heads % pages.heads == 0 &&
                          (layers.empty() || (pages.count == page_count && pages.heads == kv_heads &&
                                              pages.head_size == head_size)),
                      "layer ", layers.size(), " does not fit those before it");
    page_count = pages.count, kv_heads = pages.heads, head_size = pages.head_size;
    const Packed* four = &linears[layer.first];
    check(four[0], model, (heads + 2 * kv_heads) * head_size);
    check(four[1], heads * head_size, model);
    check(four[2], model, gated ? four[2].task.features / 2 * 2 : four[2].task.features);
    check(four[3], gated ? four[2].task.features / 2 : four[2].task.features, model);
    feed_forward = std::max(feed_forward, four[3].width);
    layers.push_back(layer);
  }

  // The last layer also attends to the pages of a memory, with the last two linear layers for queries and output.
  void add_memory(const Tensor& pre_memory, const Tensor& k, const Tensor& v, const optional<Tensor>& k_scale,
                  const optional<Tensor>& v_scale) {
    const Pages pages(k, v, k_scale, v_scale);
    TORCH_CHECK_VALUE(!layers.empty() && int64_t(linears.size()) == layers.back().end + 2 &&
                          heads % pages.heads == 0 && pages.head_size == head_size &&
                          (!memory_heads || (pages.heads == memory_heads && pages.count == memory_pages)),
                      "the memory does not fit the layer, or those before it");
    Layer& layer = layers.back();
    layer.pre_memory = floats(pre_memory, model, "pre_memory");
    layer.memory = attention_task(pages, heads, scale, 0, soft_cap, false);
    check(linears[layer.end], model, heads * head_size);
    check(linears[layer.end + 1], heads * head_size, model);
    layer.end += 2;
    memory_heads = pages.heads, memory_pages = pages.count;
    for (const optional<Tensor>& tensor : {optional(pre_memory), optional(k), optional(v), k_scale, v_scale})
      kept(tensor);
  }

  // Before the first layer: a step begins with rows of `table`, times `factor`, and what `places` has for each position.
  void embed_by(const Tensor& table, double factor, const optional<Tensor>& places) {
    type = float_type(table, "the embedding");
    TORCH_CHECK_VALUE(table.dim() == 2 && table.is_contiguous() && table.size(1) == model, "an embedding of shape ",
                      table.sizes(), " is not contiguous rows of ", model);
    embedding = kept(table);
    embedding_scale = float(factor);
    if (!places) return;
    TORCH_CHECK_VALUE(places->scalar_type() == table.scalar_type() && places->dim() == 2 && places->is_contiguous() &&
                          places->size(1) == model,
                      "positions of shape ", places->sizes(), " are not contiguous rows of ", model);
    positions = kept(*places);
  }

  // The layers whose inputs a step writes into its features; the number of layers stands for the final norm's output.
  void observe(const std::vector<int64_t>& wanted) {
    for (int64_t layer : wanted)
      TORCH_CHECK_VALUE(layer >= 0 && layer <= int64_t(layers.size()), "there is no layer ", layer, " to observe");
    observed = wanted;
  }

  // Hidden states (T, E) after the final norm. `turns` are cosines, sines and each row's place among them, turn after
  // turn; `memory` the pages of each sequence's memory and its lengths, where layers have one; `adapted` the rows that
  // adapters change, if any. `features` (T, observed layers · E), if given, is written.
  Tensor hidden(const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots, const Tensor& block_tables,
                const Tensor& query_starts, const Tensor& context_lens, const std::vector<Tensor>& memory,
                const Adapted& adapted, const Features& features) {
    Tensor out = at::empty({ids.numel(), model}, embedding.options());
    run(ids, turns, slots, block_tables, query_starts, context_lens, memory, adapted, features, [&](const Step& now) {
      join(now, norm, out.mutable_data_ptr());
      note(now, int64_t(layers.size()), (const char*)out.const_data_ptr());
    });
    return out;
  }

  // Of the N rows asked for, logits (N, V) in float32 as the output layer gives them in the model's type, and the
  // largest of each panel of them (N, V / PANEL), NaN where one is.
  std::tuple<Tensor, Tensor> logits(const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots,
                                    const Tensor& block_tables, const Tensor& query_starts, const Tensor& context_lens,
                                    const std::vector<Tensor>& memory, const Adapted& adapted,
                                    const Features& features, const Tensor& rows) {
    TORCH_CHECK_VALUE(!layers.empty() && int64_t(linears.size()) == layers.back().end + 1, "there is no output layer");
    check(linears.back(), model, linears.back().task.features);
    const int64_t count = rows.numel(), width = linears.back().task.features, panels = up(width, PANEL) / PANEL;
    const int64_t* wanted = integers<int64_t>(rows, count, "rows");
    TORCH_CHECK_VALUE(count <= ids.numel(), count, " rows of ", ids.numel(), " are asked for");
    for (int64_t i = 0; i < count; i++)
      TORCH_CHECK_INDEX(wanted[i] >= 0 && wanted[i] < ids.numel(), "row ", wanted[i], " is beyond the ", ids.numel());
    const auto floats = embedding.options().dtype(at::kFloat);
    const Tensor out = at::empty({count, width}, floats), peaks = at::empty({count, panels}, floats);
    run(ids, turns, slots, block_tables, query_starts, context_lens, memory, adapted, features, [&](const Step& now) {
      if (!count && !now.features) return;
      join(now, norm, now.x);
      note(now, int64_t(layers.size()), now.x);
      if (!count) return;
      const int64_t bytes = model * embedding.element_size();
      for (int64_t i = 0; i < count; i++) std::memcpy(now.delta + i * bytes, now.x + wanted[i] * bytes, bytes);
      answer(now, now.delta, count, out.mutable_data_ptr<float>(), peaks.mutable_data_ptr<float>());
    });
    return {out, peaks};
  }

  // What steps compute in; it grows with the rows of a step.
  Tensor scratch() const { return room; }

 private:
  struct Layer {
    const float *pre_attention, *post_attention, *pre_mlp, *post_mlp;
    const float* pre_memory;  // none where it has no memory
    tw::RopeTask rope;
    tw::AttentionTask attention, memory;
    int64_t turn, first, end;  // of its linear layers
  };

  // One batch, and where its values lie.
  struct Step {
    int64_t rows;
    Sequences sequences;
    char *stream = nullptr, *delta = nullptr, *x = nullptr;  // of the model's size
    char *wide = nullptr, *narrow = nullptr;  // query, key and value, then queries; gate and up, then their product
    char* mixed = nullptr;                    // what attention gives
    char* row_memory = nullptr;               // what a linear layer makes of its rows
    float* sums = nullptr;
    AdaptedRows* adapted = nullptr;
    char* features = nullptr;  // what is observed of each row
  };

  // All layers over one batch, then what `end` makes of them.
  template <class End>
  void run(const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots, const Tensor& block_tables,
           const Tensor& query_starts, const Tensor& context_lens, const std::vector<Tensor>& memory,
           const Adapted& adapted, const Features& features, const End& end) {
    RECORD_FUNCTION("torchwright::decode_step", std::vector<c10::IValue>({ids}));
    TORCH_CHECK_VALUE(!layers.empty() && embedding.defined(), "a plan of ", layers.size(),
                      " layers cannot run, or one without an embedding");
    const int64_t rows = ids.numel();
    Step now{rows, Sequences(block_tables, query_starts, context_lens, rows, page_count)};
    std::vector<tw::RopeTask> ropes;
    for (size_t i = 0; i + 2 < turns.size(); i += 3)
      ropes.push_back(rope_task(turns[i], turns[i + 1], turns[i + 2], slots, rows, head_size, page_count));
    for (const Layer& layer : layers) {
      TORCH_CHECK_VALUE(layer.turn < int64_t(ropes.size()), "there is no turn ", layer.turn);
      check_reach(layer.attention, now.sequences);
    }
    const int64_t* tokens = integers<int64_t>(ids, rows, "ids");
    for (int64_t i = 0; i < rows; i++)
      TORCH_CHECK_INDEX(tokens[i] >= 0 && tokens[i] < embedding.size(0), "token ", tokens[i], " is beyond the ",
                        embedding.size(0), " of the embedding");
    TORCH_CHECK_VALUE(memory.size() == (memory_heads ? 2 : 0), memory.size(),
                      " tensors of a memory; pages and lengths are wanted where layers have one");
    TORCH_CHECK_VALUE(!adapted || (type == Type::bf16 && !memory_heads),
                      "adapters are for a stream in bfloat16 and layers without a memory");
    if (features) {
      TORCH_CHECK_VALUE(float_type(*features, "features") == type && features->is_contiguous() &&
                            features->dim() == 2 && features->size(0) == rows && !observed.empty() &&
                            features->size(1) == int64_t(observed.size()) * model,
                        "features of shape ", features->sizes(), " are not contiguous rows of ", observed.size(),
                        " observed layers");
      now.features = (char*)features->mutable_data_ptr();
    }
    if (!rows) return;
    if (adapted) now.adapted = adapted->get();
    const int64_t sums_size = layers[0].attention.sums_size();
    const Pieces pieces(now.sequences, heads / kv_heads, kv_heads, sums_size);
    optional<Sequences> remembered;
    optional<Pieces> memory_pieces;
    if (memory_heads) {
      remembered.emplace(memory[0], query_starts, memory[1], rows, memory_pages, false);
      memory_pieces.emplace(*remembered, heads / memory_heads, memory_heads, sums_size);
    }
    place(now, embedding.element_size(), std::max(pieces.sums, memory_pieces ? memory_pieces->sums : 0));
    const tw::Pool::Team team(own);
    embed(now, tokens, ropes[0].positions);
    for (const Layer& layer : layers) {
      attention(now, layer, ropes[layer.turn], pieces, &layer == layers.data());
      note(now, &layer - layers.data(), now.stream);
      if (layer.pre_memory) remember(now, layer, &linears[layer.first + 4], *memory_pieces);
      feed_forward_block(now, layer);
    }
    end(now);
  }

  const Tensor& kept(const Tensor& tensor) { return tensors.emplace_back(tensor); }
  void kept(const optional<Tensor>& tensor) {
    if (tensor) tensors.push_back(*tensor);
  }

  void check(const Packed& layer, int64_t width, int64_t features) const {
    TORCH_CHECK_VALUE(layer.width == width && layer.task.features == features, "a linear layer of ", layer.width,
                      " to ", layer.task.features, " features is where one of ", width, " to ", features, " is wanted");
  }

  void place(Step& now, int64_t bytes, int64_t sums) {
    const int64_t q = heads * head_size, wide = std::max(q + 2 * kv_heads * head_size, 2 * feed_forward);
    int64_t rows_bytes = 0;
    for (const Packed& linear : linears) rows_bytes = std::max(rows_bytes, Room(linear, now.rows).bytes);
    const auto of = [&](int64_t width) { return up(now.rows * width * bytes, 64); };
    const int64_t sizes[] = {of(model), of(model), of(model),  of(wide), of(std::max(q, feed_forward)),
                             of(q),     rows_bytes, 4 * sums};
    int64_t all = 0;
    for (int64_t size : sizes) all += size;
    if (!room.defined() || room.numel() < all) room = at::empty({all}, at::kByte);
    char* at = (char*)room.mutable_data_ptr();
    const int64_t* size = sizes;
    for (char** part : {&now.stream, &now.delta, &now.x, &now.wide, &now.narrow, &now.mixed, &now.row_memory})
      *part = at, at += *size++;
    now.sums = (float*)at;
  }

  void embed(const Step& now, const int64_t* ids, const int64_t* places) const {
    const int64_t bytes = model * embedding.element_size();
    for (int64_t i = 0; i < now.rows; i++)
      std::memcpy(now.stream + i * bytes, (const char*)embedding.const_data_ptr() + ids[i] * bytes, bytes);
    if (type == Type::f32) shift((float*)now.stream, now.rows, places);
    else shift((c10::BFloat16*)now.stream, now.rows, places);
  }

  template <class T>
  void shift(T* stream, int64_t rows, const int64_t* places) const {
    if (embedding_scale != 1) scale_by(embedding_scale, stream, rows * model);
    if (!positions.defined()) return;
    for (int64_t i = 0; i < rows; i++) {
      TORCH_CHECK_INDEX(places[i] < positions.size(0), "position ", places[i], " is beyond the ", positions.size(0));
      const T* place = (const T*)positions.const_data_ptr() + places[i] * model;
      for (int64_t d = 0; d < model; d++) stream[i * model + d] = T(float(stream[i * model + d]) + float(place[d]));
    }
  }

  template <class T>
  static void scale_by(float factor, T* values, int64_t count) {
    for (int64_t i = 0; i < count; i++) values[i] = T(float(values[i]) * factor);
  }

  // Logits of `count` rows that are normalized, and their peaks. A piece's numbers in bfloat16 lie in the last half of
  // the place of its floats, so that they need no memory of their own.
  void answer(const Step& now, const char* x, int64_t count, float* out, float* peaks) const {
    const auto& k = kernels();
    const Packed& head = linears.back();
    const int64_t features = head.task.features, panels = up(features, PANEL) / PANEL;
    const bool wide = type == Type::f32;
    over_blocks(with_rows(head, x, type, count, now.row_memory, about_zero), count, panels, [&](tw::LinearTask part) {
      const int64_t end = std::min(part.panel_end * PANEL, features);
      part.out = wide ? (char*)out : (char*)out + 2 * end;
      part.out_stride = wide ? features : 2 * features;
      (k.*head.multiply)(part);
      for (int64_t row = part.row_begin; row < part.row_end; row++)
        for (int64_t panel = part.panel_begin; panel < part.panel_end; panel++) {
          const int64_t at = panel * PANEL;
          const char* from = (const char*)part.out + (row * part.out_stride + at) * (wide ? 4 : 2);
          peaks[row * panels + panel] = k.widen_peak(from, type, out + row * features + at, std::min(PANEL, end - at));
        }
    });
  }

  void multiply(const Step& now, const Packed& layer, const char* x, char* out) const {
    ::multiply(layer, x, type, now.rows, out, now.row_memory, about_zero, nothing_more);
  }

  // One of a layer's four, with what adapters add to it.
  void project(const Step& now, const Layer& layer, int64_t which, const char* x, char* out) const {
    const Packed& linear = linears[layer.first + which];
    multiply(now, linear, x, out);
    if (now.adapted)
      now.adapted->add(4 * (&layer - layers.data()) + which, out, x, now.rows, linear.width, linear.task.features);
  }

  void normalize(const Step& now, const char* x, const char* residual, const float* weight, void* out, char* sum) const {
    const auto& k = kernels();
    each_row(now.rows, model, [&](int64_t row) {
      k.rms_norm(x, residual, weight, out, sum, type, model, row, eps);
    });
  }

  // Adds what the last block has computed to the stream, and normalizes the sum.
  void join(const Step& now, const float* weight, void* out) const {
    normalize(now, now.delta, now.stream, weight, out, now.stream);
  }

  // Copies rows of the model's size to where a layer's input is observed. The stream is a layer's input from the
  // norm before its attention to the norm behind it.
  void note(const Step& now, int64_t layer, const char* rows) const {
    if (!now.features) return;
    const int64_t bytes = model * embedding.element_size(), wide = int64_t(observed.size()) * bytes;
    for (size_t place = 0; place < observed.size(); place++)
      for (int64_t row = 0; observed[place] == layer && row < now.rows; row++)
        std::memcpy(now.features + row * wide + int64_t(place) * bytes, rows + row * bytes, bytes);
  }

  void leave(const Step& now, const float* weight) const {
    if (weight) normalize(now, now.delta, nullptr, weight, now.delta, nullptr);
  }

  void attention(const Step& now, const Layer& layer, const tw::RopeTask& turn, const Pieces& pieces,
                 bool first) const {
    if (first) normalize(now, now.stream, nullptr, layer.pre_attention, now.x, nullptr);
    else join(now, layer.pre_attention, now.x);
    project(now, layer, 0, now.x, now.wide);
    tw::RopeTask rope = layer.rope;
    rope.cos = turn.cos, rope.sin = turn.sin, rope.rotated = turn.rotated;
    rope.positions = turn.positions, rope.slots = turn.slots;
    rope.qkv = now.wide, rope.q = now.narrow, rope.type = type;
    rope_rows(rope, now.rows);
    tw::AttentionTask task = layer.attention;
    task.q = now.narrow, task.q_type = type, task.out = now.mixed;
    pieces.attend(task, now.sums);
    project(now, layer, 1, now.mixed, now.delta);
    leave(now, layer.post_attention);
  }

  // Attention to what each sequence remembers.
  void remember(const Step& now, const Layer& layer, const Packed* two, const Pieces& pieces) const {
    join(now, layer.pre_memory, now.x);
    multiply(now, two[0], now.x, now.narrow);
    tw::AttentionTask task = layer.memory;
    task.q = now.narrow, task.q_type = type, task.out = now.mixed;
    pieces.attend(task, now.sums);
    multiply(now, two[1], now.mixed, now.delta);
  }

  void feed_forward_block(const Step& now, const Layer& layer) const {
    const int64_t width = linears[layer.first + 3].width;
    join(now, layer.pre_mlp, now.x);
    project(now, layer, 2, now.x, now.wide);
    if (gated) gated_rows(now.wide, now.narrow, type, width, now.rows, activation);
    else activate_rows(now.wide, now.narrow, type, width, now.rows, activation);
    project(now, layer, 3, now.narrow, now.delta);
    leave(now, layer.post_mlp);
  }

  const int64_t heads, model;
  const double scale, soft_cap;
  const tw::Activation activation;
  const bool gated;
  const float eps;
  const float* norm;
  Type type = Type::f32;  // of the residual stream
  Tensor embedding;
  float embedding_scale = 1;
  Tensor positions;  // learned ones, or none
  int64_t page_count = 0, kv_heads = 0, head_size = 0, feed_forward = 0;
  int64_t memory_pages = 0, memory_heads = 0;
  std::vector<Packed> linears;  // four a layer, two more of one with a memory, and the output layer where a plan has it
  std::vector<Layer> layers;
  std::vector<int64_t> observed;
  std::vector<Tensor> tensors;  // whose memory all of this points to
  Tensor room;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.class_<DecodePlan>("DecodePlan")
      .def(torch::init<int64_t, double, double, const std::string&, bool, double, const Tensor&>())
      .def("add_linear", &DecodePlan::add_linear)
      .def("add_layer", &DecodePlan::add_layer)
      .def("add_memory", &DecodePlan::add_memory)
      .def("embed_by", &DecodePlan::embed_by)
      .def("observe", &DecodePlan::observe)
      .def("hidden", &DecodePlan::hidden)
      .def("logits", &DecodePlan::logits)
      .def("scratch", &DecodePlan::scratch);
}
