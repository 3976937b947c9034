// A step of a decoder as a program: the operators' own kernels on rows that never leave the plan's memory. ops.cpp takes
// this in, whose helpers it uses.
#pragma once

#include <ATen/record_function.h>
#include <torch/custom_class.h>

#include <functional>
#include <type_traits>

#include "draws.h"

namespace {

class Choices;

using Adapted = optional<c10::intrusive_ptr<AdaptedRows>>;
using Features = optional<Tensor>;
using Ints = std::vector<int64_t>;

// Numbers of every row of a step, in the stream's type: `width` of them from `first` on, in a room whose rows are
// `stride` numbers long.
struct Cells {
  int64_t room, first, width, stride;
  bool dense() const { return width == stride; }
};

// What is the same in every step over one cache: weights, pages, the program, and the memory that steps compute in.
class DecodePlan : public torch::CustomClassHolder {
 public:
  // `like` has the type of the residual stream.
  explicit DecodePlan(const Tensor& like)
      : type(float_type(like, "the embedding")), element(like.element_size()), options(like.options().requires_grad(false)) {}

  // A room of at least `width` numbers a row. Later widths of one room only widen it.
  void room(int64_t number, int64_t width);
  // A packed linear layer, as `PackedLinear.planned` describes it; its number.
  int64_t add_linear(const Tensor& weight, const optional<Tensor>& scale, const optional<Tensor>& bias, int64_t width,
                     int64_t features, int64_t group, int64_t bits, int64_t digits, bool floats, int64_t layout);
  // Tokens that are read as another, in every table.
  void read_as(const Ints& tokens, int64_t other);

  // The program, operation by operation. Cells are (room, first, width, stride).
  void lookup(const Tensor& table, double factor, const Ints& to);
  void places(const Tensor& table, const Ints& to);
  void copy(const Ints& from, int64_t from_step, const Ints& to, int64_t to_step, int64_t parts, int64_t size,
            bool halves);
  void add(const Ints& a, const Ints& b, const Ints& to);
  void multiply(const Ints& a, const Ints& b, const Ints& to);
  void scale(double factor, const Ints& from, const Ints& to);
  void scale_by(const Tensor& factors, const Ints& from, const Ints& to);
  void clamp(double limit, const Ints& cells);
  void norm(const Tensor& weight, double eps, const Ints& from, const Ints& to);
  void join(const Tensor& weight, double eps, const Ints& delta, const Ints& stream, const Ints& to);
  void gated(const std::string& kind, const Ints& from, const Ints& to);
  void activate(const std::string& kind, const Ints& from, const Ints& to);
  void linear(int64_t which, const Ints& from, const Ints& to, int64_t place);
  void heads(const Tensor& weight, int64_t features, const Ints& from, int64_t from_step, const Ints& to,
             int64_t to_step);
  void store(const Ints& from, const Ints& q, const Tensor& k, const Tensor& v, const optional<Tensor>& k_scale,
             const optional<Tensor>& v_scale, bool keeps, const optional<Tensor>& q_norm,
             const optional<Tensor>& k_norm, double eps, int64_t turn);
  void attend(const Ints& q, const Ints& to, const Tensor& k, const Tensor& v, const optional<Tensor>& k_scale,
              const optional<Tensor>& v_scale, double factor, int64_t window, double soft_cap,
              const optional<Tensor>& bias, const optional<Tensor>& sinks, bool remembers);
  void short_conv(const Ints& from, const Ints& to, const Tensor& weight, const optional<Tensor>& bias,
                  const Tensor& state, bool silu);
  void gated_delta(const Ints& q, const Ints& k, const Ints& v, const Ints& a, const Ints& b, const Ints& to,
                   const Tensor& rate, const Tensor& shift, const Tensor& state, int64_t key_heads);
  void selective_scan(const Ints& q, const Ints& k, const Ints& v, const Ints& a, const Ints& to, const Tensor& rate,
                      const Tensor& shift, const Tensor& skip, const Tensor& state, int64_t key_heads);
  void gated_norm(const Ints& x, const Ints& gate, const Ints& to, const Tensor& weight, double eps, bool gate_first);
  void experts(const Ints& scores, const Ints& x, const Ints& to, int64_t first, int64_t count,
               const std::string& kind, const optional<Tensor>& bias, const optional<Tensor>& weights, int64_t chosen,
               bool sigmoid, int64_t groups, int64_t chosen_groups, int64_t ranked, bool normalize, double factor);
  // Copies rows to where a layer's input is observed; the number of layers stands for the final norm's output.
  void note(int64_t layer, const Ints& from);
  // What the program leaves, and the output layer, which may be none.
  void finish(const Ints& from, const optional<int64_t>& linear);

  // The layers whose inputs a step writes into its features.
  void observe(const Ints& wanted);
  // Hidden states (T, E). `turns` are cosines, sines and each row's place among them, turn after turn; `memory` the
  // pages of each sequence's memory and its lengths, where layers have one; `states` each sequence's slot, and rows and
  // slots of copies, where layers have states; `adapted` the rows that adapters change, if any. `features` (T, observed
  // layers · E), if given, is written.
  Tensor hidden(const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots, const Tensor& block_tables,
                const Tensor& query_starts, const Tensor& context_lens, const std::vector<Tensor>& memory,
                const std::vector<Tensor>& states, const Adapted& adapted, const Features& features);
  // Of the N rows asked for, logits (N, V) in float32 as the output layer gives them in the model's type, and the
  // largest of each panel of them (N, V / PANEL), NaN where one is.
  std::tuple<Tensor, Tensor> logits(const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots,
                                    const Tensor& block_tables, const Tensor& query_starts, const Tensor& context_lens,
                                    const std::vector<Tensor>& memory, const std::vector<Tensor>& states,
                                    const Adapted& adapted, const Features& features, const Tensor& rows);
  // A draft's program: its input is `to` of each row, rows of the decoder's features or what its last step carried on;
  // `from` is carried on, and `ids` (int64) are the tokens of the output layer's features.
  void receive(const Ints& to);
  void carry(const Ints& from, const Tensor& ids);
  // A draft's step over a batch's tokens: what it carries on of N rows, and the proposal behind each with the confidence
  // in it. `choice` (N, 4) and `keys` (N, 1) say how each sequence chooses (`Choices`).
  std::tuple<Tensor, Tensor, Tensor> follow(const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots,
                                            const Tensor& block_tables, const Tensor& query_starts,
                                            const Tensor& context_lens, const Tensor& given, const Tensor& rows,
                                            const Tensor& choice, const Tensor& keys, int64_t drawn_from);
  // Chains of proposals (B, D), -1 behind their end, and the confidence in each. Sequence b's begins with token `ids`[b]
  // at place `places`[b] and takes `most`[b] steps at most. The whole chain is accepted with the probability `reach`[b]
  // times the `acceptance` (greedy and drawn; by classes of confidence, and last the mean) of each proposal; where that
  // is `row` or less it ends. All chains end where the next call, which takes `call`[n] seconds for n of them, is
  // expected to bring fewer tokens a second than `tokens` in `seconds`, which count what comes before it.
  std::tuple<Tensor, Tensor> grow(const Tensor& ids, const Tensor& states, const Tensor& cos, const Tensor& sin,
                                  const Tensor& places, const Tensor& tables, const Tensor& choice, const Tensor& keys,
                                  const Tensor& most, const Tensor& reach, const Tensor& acceptance,
                                  const Tensor& call, double tokens, double seconds, double row,
                                  int64_t drawn_from);
  // What steps compute in; it grows with the rows of a step.
  Tensor scratch() const { return memory; }

 private:
  // One batch, and where its values lie.
  struct Step {
    int64_t rows;
    Sequences sequences;
    optional<Sequences> remembered = std::nullopt;
    std::vector<tw::RopeTask> turns = {};
    std::vector<Pieces> pieces = {};  // of each kind of attention
    tw::StateRows states = {};
    std::vector<int64_t> tokens = {};
    AdaptedRows* adapted = nullptr;
    char* features = nullptr;      // what is observed of each row
    const char* given = nullptr;   // a draft's input
    char* rooms = nullptr;
    std::vector<int64_t> offsets = {};  // of each room
    char* own = nullptr;           // what one operation needs for itself
  };

  struct Operation {
    std::function<void(const Step&)> run;
    std::function<int64_t(const Step&)> bytes;  // of its own memory; may be none
  };

  // How the attention of a layer is divided, by what that depends on.
  struct Kind {
    int64_t group, kv_heads, sums_size;
    bool remembers;
    bool operator==(const Kind&) const = default;
  };

  // A layer's turn, and the head that it turns.
  struct Turn {
    int64_t number, head_size;
  };

  struct Chain;

  template <class End>
  void compute(Step& now, const End& end);
  template <class End>
  void run(const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots, const Tensor& block_tables,
           const Tensor& query_starts, const Tensor& context_lens, const std::vector<Tensor>& memory,
           const std::vector<Tensor>& states, const Adapted& adapted, const Features& features, const End& end);
  void read_batch(Step& now, const Tensor& ids, const std::vector<Tensor>& turns, const Tensor& slots) const;
  void read_tokens(Step& now) const;
  void check_turns(const Step& now) const;
  void read_states(Step& now, const Tensor& query_starts, const std::vector<Tensor>& states) const;
  void read_features(Step& now, const Features& features) const;
  const char* read_given(const Tensor& rows, int64_t count) const;
  template <class Of>
  void guess(const Step& now, int64_t count, const Of& row_of, const Choices& choices, int64_t ahead,
             tw::Guesser& guesser, const std::function<void(int64_t, const char*, const tw::Guess&)>& take);
  void place(Step& now);
  void answer(const Step& now, const char* x, int64_t count, float* out, float* peaks) const;

  // The program's helpers.
  Cells cells(const Ints& numbers) const;
  Cells dense(const Ints& numbers, const char* what) const;
  Pages pages(const Tensor& k, const Tensor& v, const optional<Tensor>& k_scale, const optional<Tensor>& v_scale,
              int64_t& count);
  int64_t kind(const Kind& wanted);
  void state_slots(const Tensor& state);
  const Packed& layer(int64_t which, int64_t width, int64_t features) const;
  template <class Gains>
  void recurrence(const Ints& q, const Ints& k, const Ints& v, const Ints& to, const optional<Tensor>& skip,
                  const Tensor& state, int64_t heads, int64_t key_heads, bool corrects, Gains gains);
  void push(std::function<void(const Step&)> run, std::function<int64_t(const Step&)> bytes = nullptr) {
    program.push_back({std::move(run), std::move(bytes)});
  }
  void keep(const Tensor& tensor) { tensors.push_back(tensor); }
  void keep(const optional<Tensor>& tensor) {
    if (tensor) tensors.push_back(*tensor);
  }

  char* cell(const Step& now, const Cells& cells, int64_t row = 0) const {
    return now.rooms + now.offsets[cells.room] + (row * cells.stride + cells.first) * element;
  }

  // Calls `use` with a null pointer to a number of the stream's type.
  template <class Use>
  void typed(const Use& use) const {
    if (type == Type::f32) use((float*)nullptr);
    else use((c10::BFloat16*)nullptr);
  }

  template <class Function>
  void map(const Ints& from, const Ints& to, Function function);
  template <class Function>
  void map(const Ints& a, const Ints& b, const Ints& to, Function function);

  const Type type;
  const int64_t element;
  const at::TensorOptions options;
  std::vector<int64_t> widths;  // of the rooms
  std::vector<Packed> linears;
  std::vector<Operation> program;
  std::vector<Kind> kinds;
  std::vector<Turn> turned;
  std::vector<tw::AttentionTask> biased;  // whose bias reaches only so far
  Ints aliased;
  int64_t alias = 0;
  int64_t vocabulary = -1, place_count = -1;  // rows of the smallest tables, or none
  int64_t page_count = -1, memory_pages = -1, state_count = -1;
  std::vector<int64_t> noted, observed;
  optional<Cells> result, carried;
  int64_t given = 0;                    // numbers of each row that a draft's step is given
  const int64_t* proposed = nullptr;    // tokens of the output layer's features
  std::vector<float> scores;            // a draft's logits and their peaks
  optional<int64_t> head;
  std::vector<Tensor> tensors;  // whose memory all of this points to
  Tensor memory;
};

}  // namespace
