// The kernels as PyTorch operators: argument checks, the choice of instruction set, threads.
#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "levels.h"
#include "pool.h"

namespace {

using at::Tensor;
using std::optional;
using tw::DEPTH;
using tw::Layout;
using tw::PAGE;
using tw::PANEL;
using tw::Type;

std::atomic<const tw::Kernels*> chosen{nullptr};

void use_isa(c10::string_view wanted) {
  std::string names;
  for (auto& [name, table] : tw::runnable()) {
    if (name == wanted) return chosen.store(table());
    names += (names.empty() ? "" : ", ") + name;
  }
  TORCH_CHECK_VALUE(false, "TORCHWRIGHT_ISA=", wanted, " cannot run here; this machine has: ", names);
}

const tw::Kernels& kernels() {
  if (!chosen.load()) {
    const char* wanted = std::getenv("TORCHWRIGHT_ISA");
    use_isa(wanted ? wanted : tw::runnable().front().first.c_str());
  }
  return *chosen.load();
}

std::string isa() { return kernels().name; }

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (auto& [name, table] : tw::runnable()) names.push_back(name);
  return names;
}

// Whether 4-bit integers in groups are to be laid out as tiles here.
bool reads_tiles() { return kernels().linear_tiles; }

Type type_of(const Tensor& x, const char* what) {
  if (x.scalar_type() == at::kFloat) return Type::f32;
  if (x.scalar_type() == at::kBFloat16) return Type::bf16;
  TORCH_CHECK_TYPE(x.scalar_type() == at::kChar, what, " is ", x.scalar_type(), "; float32 or bfloat16 is wanted");
  return Type::s8;
}

Type float_type(const Tensor& x, const char* what) {
  const Type type = type_of(x, what);
  TORCH_CHECK_TYPE(type != Type::s8, what, " is int8; float32 or bfloat16 is wanted");
  return type;
}

const float* floats(const optional<Tensor>& x, int64_t count, const char* what) {
  if (!x) return nullptr;
  TORCH_CHECK_VALUE(x->scalar_type() == at::kFloat && x->is_contiguous() && x->numel() == count, what,
                    " must be a contiguous float32 tensor of ", count, " values; it has ", x->numel(), " of ",
                    x->scalar_type());
  return x->const_data_ptr<float>();
}

template <class T>
const T* integers(const Tensor& x, int64_t count, const char* what) {
  TORCH_CHECK_VALUE(x.scalar_type() == c10::CppTypeToScalarType<T>::value && x.is_contiguous() && x.numel() == count,
                    what, " must be a contiguous ", c10::CppTypeToScalarType<T>::value, " tensor of ", count,
                    " values; it has ", x.numel(), " of ", x.scalar_type());
  return x.const_data_ptr<T>();
}

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Threads of this caller's kernels beside torch's, or none: then they take torch's own.
thread_local int64_t own = 0;

int64_t own_threads(int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, "count is ", count, "; 0 for torch's or a number of threads is wanted");
  return std::exchange(own, count);
}

int64_t threads() { return own ? own : at::get_num_threads(); }

// Tasks side by side, and the next of them that is free; a line of cache to itself.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

// Every task once, on all threads. Each has a share of them, the same in every call, since what it wrote or read before
// is in its core's own cache; then it takes what others have left.
template <class Body>
void each(int64_t tasks, const Body& body) {
  if (own) return tw::Pool::share(tasks, own, body);
  if (tasks == 1) return body(0);
  constexpr int64_t MOST_SHARES = 64;
  const int64_t workers = std::min(tasks, threads()), shares = std::min(workers, MOST_SHARES);
  std::array<Share, MOST_SHARES> share;
  for (int64_t n = 0; n < shares; n++) {
    share[n].next.store(tasks * n / shares, std::memory_order_relaxed);
    share[n].end = tasks * (n + 1) / shares;
  }
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; worker++)
      for (int64_t n = 0; n < shares; n++) {
        Share& from = share[(worker + n) % shares];
        for (int64_t i; (i = from.next.fetch_add(1, std::memory_order_relaxed)) < from.end;) body(i);
      }
  });
}

using tw::TILE_INPUTS, tw::TILE_ROWS;

constexpr int64_t PIECES = 4;  // a thread: enough for them to end together, and none so small that taking it costs more

// Row and panel ranges of a linear layer. A block of rows is small enough for what the kernels read of it again and
// again to stay in the second level of cache; few rows are one block, and then threads share the panels only. Blocks
// begin at whole tiles of rows.
template <class Run>
void over_blocks(tw::LinearTask task, int64_t rows, int64_t panels, const Run& run) {
  const int64_t most = tw::ROWS_AT_ONCE / task.digits;
  const int64_t row_blocks = up(rows, most) / most;
  const int64_t pieces = std::min(panels, (rows >= 8 ? PIECES : PIECES / 2) * threads());
  each(row_blocks * pieces, [&](int64_t i) {
    tw::LinearTask part = task;
    const int64_t row_block = i / pieces, piece = i % pieces;
    part.row_begin = rows * row_block / row_blocks / TILE_ROWS * TILE_ROWS;
    part.row_end = row_block + 1 < row_blocks ? rows * (row_block + 1) / row_blocks / TILE_ROWS * TILE_ROWS : rows;
    part.panel_begin = panels * piece / pieces;
    part.panel_end = panels * (piece + 1) / pieces;
    run(part);
  });
}

// A packed linear layer whose tensors have been checked, and which live for as long as it does.
struct Packed {
  tw::LinearTask task{};  // what is the same in all calls
  int64_t width = 0;      // features of its rows
  void (*tw::Kernels::*multiply)(const tw::LinearTask&) = nullptr;
  bool integers = false;  // what its rows are made
  bool tiles = false;     // weights are the left operand of tiles, and rows are turned
};

// What every layer checks and fills in; `bytes` is a packed panel's size.
Packed packed(const Tensor& weight, int64_t bytes, int64_t width, int64_t depth, int64_t group, int64_t digits,
              const optional<Tensor>& bias, int64_t features) {
  TORCH_CHECK_VALUE(features > 0 && features <= weight.numel(), "features is ", features, "; the packed weight has ",
                    weight.numel(), " bytes");
  const int64_t panels = up(features, PANEL) / PANEL;
  TORCH_CHECK_VALUE(weight.is_contiguous() && weight.scalar_type() == at::kByte && weight.numel() == panels * bytes,
                    "the packed weight has ", weight.numel(), " bytes of ", weight.scalar_type(), "; ", features,
                    " features of depth ", depth, " take ", panels * bytes, " of uint8");
  Packed layer;
  layer.width = width;
  layer.task.weight = weight.const_data_ptr();
  layer.task.bias = floats(bias, features, "bias");
  layer.task.depth = depth;
  layer.task.digits = digits;
  layer.task.group = group;
  layer.task.features = features;
  layer.task.out_stride = features;
  return layer;
}

int64_t width_of(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) > 0, "x must have features in its last dimension");
  return x.size(-1);
}

int64_t row_count(const Tensor& x) { return x.numel() / width_of(x); }

// Bytes between rows of activations beyond their own: rows a power of two apart would share one set of the cache.
constexpr int64_t APART = 64;

constexpr int64_t LONGEST = 65536;     // features whose products of two bytes, 128 · 255 at most, an int32 can sum
constexpr int64_t SERIAL = 16384;  // elements below which a second thread costs more than it saves

template <class Body>
void each_row(int64_t rows, int64_t features, const Body& body) {
  const int64_t fewest = std::max<int64_t>(1, SERIAL / std::max<int64_t>(1, features));
  const int64_t pieces = std::min(up(rows, fewest) / fewest, PIECES * threads());
  each(pieces, [&](int64_t i) {
    for (int64_t row = rows * i / pieces; row < rows * (i + 1) / pieces; row++) body(row);
  });
}

void check_group(int64_t group) {
  TORCH_CHECK_VALUE(group == 32 || group == 64 || group == 128, "group_size is ", group, "; 32, 64 or 128 is wanted");
}

// Rows as integers of so many digits; group 0 is 8-bit weights.
Packed packed_integers(const Tensor& weight, const Tensor& scale, const optional<Tensor>& bias, int64_t width,
                       int64_t features, int64_t group, int64_t digits) {
  TORCH_CHECK_VALUE(width <= LONGEST, "x has ", width, " features; sums of int32 hold at most ", LONGEST);
  const int64_t depth = up(width, std::max(group, DEPTH));
  const int64_t bytes = group ? depth / group * (PANEL + group * PANEL / 2) : depth * PANEL;
  Packed layer = packed(weight, bytes, width, depth, group, digits, bias, features);
  layer.task.scale = floats(scale, up(features, PANEL), "scale");
  layer.multiply = group ? &tw::Kernels::linear_w4 : &tw::Kernels::linear_w8;
  layer.integers = true;
  return layer;
}

// Weights in bfloat16, or made so as they are read: `bits` of them is 16, or that of integers or floats in groups.
Packed packed_wide(const Tensor& weight, const optional<Tensor>& bias, int64_t width, int64_t features, int64_t group,
                   int64_t bits, bool floats, Layout layout) {
  const int64_t depth = up(width, std::max(group, DEPTH));
  const int64_t bytes = group ? depth / group * tw::grouped_bytes(group, bits, floats, layout) : depth * PANEL * 2;
  Packed layer = packed(weight, bytes, width, depth, group, 1, bias, features);
  layer.task.bits = bits;
  layer.task.floats = floats;
  layer.task.layout = layout;
  layer.tiles = layout != Layout::lanes;
  layer.multiply = layer.tiles ? &tw::Kernels::linear_tiles
                   : group     ? &tw::Kernels::linear_grouped
                               : &tw::Kernels::linear_bf16;
  return layer;
}

void check_level(const Packed& layer) {
  TORCH_CHECK_VALUE(!layer.tiles || reads_tiles(), "the weight is packed for processors with AMX; the kernels in use, ",
                    kernels().name, ", do not use it; load the model again");
}

// Whether rows are turned for tiles; a single one is what tiles want as it is.
bool turned(const Packed& layer, int64_t rows) { return layer.tiles && rows > 1; }

// Memory for what a layer makes of its rows, in parts that each begin a line of the cache: the rows, and their scales
// and sums where they are integers, or the rows turned.
struct Room {
  int64_t stride, scales, sums, bytes;  // bytes between rows, before the scales, before the sums, and of all

  Room(const Packed& layer, int64_t rows) {
    const int64_t depth = layer.task.depth, digits = layer.task.digits;
    stride = layer.integers ? depth + APART : 2 * depth + APART;
    scales = up(rows * digits * stride, 64);
    sums = layer.integers ? scales + up(rows * 4, 64) : scales;
    bytes = layer.integers ? up(sums + rows * digits * (depth / tw::SUMMED + 1) * 4, 64)
                           : scales + 2 * turned_rows(layer, rows) * depth;
  }

  // For each of any number of rows.
  static int64_t of_each(const Packed& layer) {
    return Room(layer, 1).bytes + (layer.tiles ? 4 * layer.task.depth : 0);  // a last tile at most doubles the rows
  }

 private:
  // Fewer than a tile has are not padded.
  static int64_t turned_rows(const Packed& layer, int64_t rows) {
    return !turned(layer, rows) ? 0 : rows < TILE_ROWS ? rows : up(rows, TILE_ROWS);
  }
};

// A layer's product without its output, whose rows lie in `memory` once they are made.
tw::LinearTask over_memory(const Packed& layer, Type type, int64_t rows, char* memory) {
  const Room room(layer, rows);
  tw::LinearTask task = layer.task;
  task.out_type = type;
  task.rows = memory;
  task.row_stride = room.stride;
  task.columns = std::min(rows, TILE_ROWS);
  if (layer.integers) {
    task.row_scale = (const float*)(memory + room.scales);
    task.row_sums = (const int32_t*)(memory + room.sums);
  }
  return task;
}

// Where the rows from `first` on of such a task are made integers.
tw::QuantizedRows quantized(const tw::LinearTask& task, int64_t first) {
  return {(int8_t*)task.rows + first * task.digits * task.row_stride,
          (float*)task.row_scale + first,
          (int32_t*)task.row_sums + first * task.digits * (task.depth / tw::SUMMED + 1),
          task.depth,
          task.row_stride,
          task.digits};
}

// Rows that were made by `widen_row`, turned behind themselves in their memory: piece `i` of `pieces`.
void turn_rows(const Packed& layer, const tw::LinearTask& task, int64_t rows, int64_t i, int64_t pieces) {
  const auto* from = (const uint16_t*)task.rows;
  auto* to = (uint16_t*)((char*)task.rows + Room(layer, rows).scales);
  const int64_t stride = task.row_stride / 2, steps = task.depth / TILE_INPUTS;
  const int64_t all = up(rows, TILE_ROWS) / TILE_ROWS * steps;
  for (int64_t unit = all * i / pieces, end = all * (i + 1) / pieces, count; unit < end; unit += count) {
    const int64_t row = unit / steps * TILE_ROWS, step = unit % steps;
    count = std::min(end - unit, steps - step);
    kernels().turn_rows(from + row * stride + step * TILE_INPUTS, stride, std::min(rows - row, TILE_ROWS), task.columns,
                        count, to + unit * TILE_INPUTS * task.columns);
  }
}

// The task reads them from now on.
void read_turned(const Packed& layer, tw::LinearTask& task, int64_t rows) {
  task.rows = (const char*)task.rows + Room(layer, rows).scales;
}

// What all pieces of a layer's product share, its rows made and kept in `memory`; `quantize` makes integers of one.
template <class Quantize>
tw::LinearTask with_rows(const Packed& layer, const void* x, Type type, int64_t rows, char* memory,
                         const Quantize& quantize) {
  const auto& k = kernels();
  check_level(layer);
  tw::LinearTask task = over_memory(layer, type, rows, memory);
  if (layer.integers) {
    const tw::QuantizedRows to = quantized(task, 0);
    each_row(rows, layer.width, [&](int64_t row) { quantize(k, x, type, layer.width, row, to); });
  } else {
    each_row(rows, layer.width, [&](int64_t row) {
      k.widen_row(x, type, layer.width, row, (uint16_t*)memory, task.depth, task.row_stride / 2);
    });
    if (!turned(layer, rows)) return task;
    const int64_t pieces = std::clamp<int64_t>(rows * task.depth / SERIAL, 1, PIECES * threads());
    each(pieces, [&](int64_t i) { turn_rows(layer, task, rows, i, pieces); });
    read_turned(layer, task, rows);
  }
  return task;
}

// out = x Wᵀ + b. `finish` is given each part of the output once it is computed.
template <class Quantize, class Finish>
void multiply(const Packed& layer, const void* x, Type type, int64_t rows, void* out, char* memory,
              const Quantize& quantize, const Finish& finish) {
  tw::LinearTask task = with_rows(layer, x, type, rows, memory, quantize);
  task.out = out;
  over_blocks(task, rows, up(task.features, PANEL) / PANEL, [&](const tw::LinearTask& part) {
    const auto& k = kernels();
    (k.*layer.multiply)(part);
    finish(k, part);
  });
}

void about_zero(const tw::Kernels& k, const void* x, Type type, int64_t width, int64_t row, const tw::QuantizedRows& to) {
  k.quantize(x, type, width, row, to);
}

void nothing_more(const tw::Kernels&, const tw::LinearTask&) {}

template <class Quantize, class Finish>
Tensor linear(const Tensor& x_in, const Packed& layer, const Quantize& quantize, const Finish& finish) {
  const Tensor x = x_in.contiguous();
  const int64_t rows = row_count(x);
  const Type type = float_type(x, "x");
  auto sizes = x.sizes().vec();
  sizes.back() = layer.task.features;
  Tensor out = at::empty(sizes, x.options());
  if (!rows) return out;
  const Tensor memory = at::empty({Room(layer, rows).bytes}, at::kByte);
  multiply(layer, x.const_data_ptr(), type, rows, out.mutable_data_ptr(), (char*)memory.data_ptr(), quantize, finish);
  return out;
}

Tensor linear(const Tensor& x, const Packed& layer) { return linear(x, layer, about_zero, nothing_more); }

Tensor linear_w8a8(const Tensor& x, const Tensor& weight, const Tensor& scale, const optional<Tensor>& bias,
                   int64_t features) {
  return linear(x, packed_integers(weight, scale, bias, width_of(x), features, 0, 1));
}

Tensor linear_w4a8(const Tensor& x, const Tensor& weight, const Tensor& scale, const optional<Tensor>& bias,
                   int64_t features, int64_t group_size) {
  check_group(group_size);
  return linear(x, packed_integers(weight, scale, bias, width_of(x), features, group_size, 1));
}

Tensor linear_w4a16(const Tensor& x, const Tensor& weight, const Tensor& scale, const optional<Tensor>& bias,
                    int64_t features, int64_t group_size) {
  check_group(group_size);
  return linear(x, packed_integers(weight, scale, bias, width_of(x), features, group_size, 2));
}

Tensor linear_bf16(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias, int64_t features) {
  return linear(x, packed_wide(weight, bias, width_of(x), features, 0, 16, false, Layout::lanes));
}

// The layout of numbers in groups, which are checked.
Layout layout_of(int64_t layout, int64_t group, int64_t bits, bool floats) {
  TORCH_CHECK_VALUE(bits == 4 || bits == 8, "bits is ", bits, "; 4 or 8 is wanted");
  if (group != 16) check_group(group);
  TORCH_CHECK_VALUE(layout == 0 || ((layout == 1 || layout == 2) && bits == 4 && !floats && group >= TILE_INPUTS),
                    "layout is ", layout, "; 0 is wanted, or 1 or 2 for 4-bit integers in groups of 32 and more");
  return Layout(layout);
}

Tensor linear_grouped(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias, int64_t features,
                      int64_t group_size, int64_t bits, bool floats, int64_t layout) {
  const Layout found = layout_of(layout, group_size, bits, floats);
  return linear(x, packed_wide(weight, bias, width_of(x), features, group_size, bits, floats, found));
}

// Tokens of heads: of each token's head its numbers lie `head_step` bytes apart, tokens `token_step`.
struct HeadRows {
  char* data;
  int64_t token_step, head_step;
  char* at(int64_t token, int64_t head) const { return data + token * token_step + head * head_step; }
};

// out[t, h] = W[h] x[t, h]: each head of a token by a weight of its own, packed one after another as one of
// `linear_bf16` is; `layer` is the first. `memory` has room for the rows of every head.
void multiply_heads(const Packed& layer, int64_t heads, int64_t weight_bytes, Type type, int64_t tokens,
                    const HeadRows& x, const HeadRows& out, char* memory) {
  const int64_t room = Room(layer, tokens).bytes, size = type == Type::f32 ? 4 : 2;
  const auto& k = kernels();
  each(heads, [&](int64_t head) {
    tw::LinearTask task = over_memory(layer, type, tokens, memory + head * room);
    for (int64_t t = 0; t < tokens; t++)
      k.widen_row(x.at(t, head), type, layer.width, 0, (uint16_t*)((char*)task.rows + t * task.row_stride), task.depth,
                  0);
    task.weight = (const char*)task.weight + head * weight_bytes;
    task.out = out.at(0, head);
    task.out_stride = out.token_step / size;
    task.panel_begin = 0, task.panel_end = up(task.features, PANEL) / PANEL;
    for (int64_t t = 0; t < tokens; t += tw::ROWS_AT_ONCE) {
      task.row_begin = t, task.row_end = std::min(t + tw::ROWS_AT_ONCE, tokens);
      k.linear_bf16(task);
    }
  });
}

// One head's packed weight, as the first of (heads, bytes).
Packed packed_head(const Tensor& weight, int64_t width, int64_t features) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) > 0 && weight.is_contiguous(), "a packed weight of shape ",
                    weight.sizes(), " is not contiguous (heads, bytes)");
  return packed_wide(weight.select(0, 0), std::nullopt, width, features, 0, 16, false, Layout::lanes);
}

Tensor linear_heads(const Tensor& x_in, const Tensor& weight, int64_t features) {
  const Tensor x = x_in.contiguous();
  TORCH_CHECK_VALUE(x.dim() == 3 && x.size(1) > 0 && weight.dim() == 2 && weight.size(0) == x.size(1),
                    "x of shape ", x.sizes(), " and a packed weight of shape ", weight.sizes(),
                    " are not (tokens, heads, features) and (heads, bytes)");
  const int64_t tokens = x.size(0), heads = x.size(1), width = width_of(x), size = x.element_size();
  const Type type = float_type(x, "x");
  const Packed layer = packed_head(weight, width, features);
  Tensor out = at::empty({tokens, heads, features}, x.options());
  if (!tokens) return out;
  const Tensor memory = at::empty({heads * Room(layer, tokens).bytes}, at::kByte);
  multiply_heads(layer, heads, weight.size(1), type, tokens,
                 {(char*)x.const_data_ptr(), heads * width * size, width * size},
                 {(char*)out.mutable_data_ptr(), heads * features * size, features * size}, (char*)memory.data_ptr());
  return out;
}

tw::Activation activation_of(c10::string_view name) {
  using tw::Activation;
  constexpr std::pair<c10::string_view, Activation> KNOWN[] = {
      {"none", Activation::none},           {"relu", Activation::relu},       {"gelu", Activation::gelu},
      {"gelu_tanh", Activation::gelu_tanh}, {"silu", Activation::silu},       {"relu6", Activation::relu6},
      {"sigmoid", Activation::sigmoid},     {"hardswish", Activation::hardswish},
      {"hardsigmoid", Activation::hardsigmoid},
  };
  std::string names;
  for (const auto& [known, activation] : KNOWN) {
    if (known == name) return activation;
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  TORCH_CHECK_VALUE(false, "activation is ", name, "; one of ", names, " is wanted");
}

void activate_rows(const void* x, void* out, Type type, int64_t features, int64_t rows, tw::Activation activation) {
  const auto& k = kernels();
  each_row(rows, 4 * features, [&](int64_t row) { k.activate_row(x, out, type, features, row, activation); });
}

Tensor activate(const Tensor& x_in, c10::string_view kind) {
  const Tensor x = x_in.contiguous();
  Tensor out = at::empty_like(x);
  activate_rows(x.const_data_ptr(), out.mutable_data_ptr(), float_type(x, "x"), width_of(x), row_count(x),
                activation_of(kind));
  return out;
}

void gated_rows(const void* x, void* out, Type type, int64_t features, int64_t rows, tw::Activation activation) {
  const auto& k = kernels();
  each_row(rows, 4 * features, [&](int64_t row) { k.gated(x, out, type, features, row, activation); });
}

tw::Activation gate_of(c10::string_view kind) {
  TORCH_CHECK_VALUE(kind == "silu" || kind == "gelu_tanh" || kind == "clamped_swiglu", "kind is ", kind,
                    "; silu, gelu_tanh or clamped_swiglu is wanted");
  return kind == "clamped_swiglu" ? tw::Activation::clamped_swiglu : activation_of(kind);
}

Tensor gated(const Tensor& x_in, c10::string_view kind) {
  const Tensor x = x_in.contiguous();
  const int64_t rows = row_count(x), features = x.size(-1) / 2;
  TORCH_CHECK_VALUE(x.size(-1) % 2 == 0, "x must hold gate and value side by side; its width is ", x.size(-1));
  auto sizes = x.sizes().vec();
  sizes.back() = features;
  Tensor out = at::empty(sizes, x.options());
  gated_rows(x.const_data_ptr(), out.mutable_data_ptr(), float_type(x, "x"), features, rows, gate_of(kind));
  return out;
}

// Pages of one layer: checked once for both operators that touch them.
struct Pages {
  int64_t count, heads, head_size;
  Type type;
  void *k, *v;
  float *k_scale = nullptr, *v_scale = nullptr;

  Pages(const Tensor& keys, const Tensor& values, const optional<Tensor>& ks, const optional<Tensor>& vs) {
    TORCH_CHECK_VALUE(keys.dim() >= 4 && keys.is_contiguous() && values.is_contiguous() &&
                          keys.numel() == values.numel() && keys.scalar_type() == values.scalar_type(),
                      "k_pages and v_pages must be contiguous and alike");
    count = keys.size(0);
    heads = keys.size(1);
    type = type_of(keys, "k_pages");
    k = keys.data_ptr();
    v = values.data_ptr();
    head_size = heads * count ? keys.numel() / (count * heads * PAGE) : 0;
    TORCH_CHECK_VALUE(count * heads * PAGE * head_size == keys.numel() && head_size % 16 == 0 && head_size > 0 &&
                          head_size <= tw::LARGEST_HEAD,
                      "pages of shape ", keys.sizes(), " do not hold ", PAGE,
                      " tokens with a head size that is a multiple of 16 up to ", tw::LARGEST_HEAD);
    if (type != Type::s8) return;
    TORCH_CHECK_VALUE(ks && vs, "pages of int8 need k_scale and v_scale");
    k_scale = const_cast<float*>(floats(ks, count * heads * PAGE, "k_scale"));
    v_scale = const_cast<float*>(floats(vs, count * heads * PAGE, "v_scale"));
  }

  template <class Task>
  void into(Task& task) const {
    task.k = k;
    task.v = v;
    task.k_scale = k_scale;
    task.v_scale = v_scale;
    task.kv_type = type;
    task.kv_heads = heads;
    task.head_size = head_size;
  }
};

// Where tokens turn to and are kept; checked, but for the tensors that a layer has of its own.
tw::RopeTask rope_task(const Tensor& cos, const Tensor& sin, const Tensor& positions, const Tensor& slots,
                       int64_t tokens, int64_t size, int64_t pages) {
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.sizes() == sin.sizes() && 2 * cos.size(1) <= size,
                    "cos and sin must be (positions, rotated / 2)");
  tw::RopeTask task{};
  task.cos = floats(cos, cos.numel(), "cos");
  task.sin = floats(sin, sin.numel(), "sin");
  task.rotated = 2 * cos.size(1);
  task.positions = integers<int64_t>(positions, tokens, "positions");
  task.slots = integers<int64_t>(slots, tokens, "slots");
  for (int64_t i = 0; i < tokens; i++) {
    TORCH_CHECK_INDEX(task.positions[i] >= 0 && task.positions[i] < cos.size(0), "position ", task.positions[i],
                      " is beyond the ", cos.size(0), " of the rotary table");
    TORCH_CHECK_INDEX(task.slots[i] >= 0 && task.slots[i] < pages * PAGE, "slot ", task.slots[i], " is beyond the ",
                      pages, " pages");
  }
  return task;
}

void rope_rows(const tw::RopeTask& task, int64_t tokens) {
  const auto& k = kernels();
  each_row(tokens, 8 * (task.heads + 2 * task.kv_heads) * task.head_size,
           [&](int64_t token) { k.rope_store(task, token); });
}

Tensor rope_store(const Tensor& qkv_in, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                  const Tensor& slots, const Tensor& k_pages, const Tensor& v_pages, const optional<Tensor>& k_scale,
                  const optional<Tensor>& v_scale, int64_t heads, int64_t kv_heads, const optional<Tensor>& q_norm,
                  const optional<Tensor>& k_norm, double eps) {
  const Tensor qkv = qkv_in.contiguous();
  const Pages pages(k_pages, v_pages, k_scale, v_scale);
  const int64_t size = pages.head_size;
  // Without key-value heads, the queries alone: of a layer that attends to what another has kept.
  TORCH_CHECK_VALUE(heads >= 0 && (pages.heads == kv_heads || !kv_heads) && qkv.dim() == 2 && heads <= qkv.size(1) &&
                        qkv.size(1) == (heads + 2 * kv_heads) * size,
                    "qkv of shape ", qkv.sizes(), " is not ", heads, " + 2 x ", kv_heads, " heads of ", size);
  const int64_t tokens = qkv.size(0);
  tw::RopeTask task = rope_task(cos, sin, positions, slots, tokens, size, pages.count);
  task.qkv = qkv.const_data_ptr();
  task.type = float_type(qkv, "qkv");
  pages.into(task);
  task.heads = heads, task.kv_heads = kv_heads;
  task.q_norm = floats(q_norm, size, "q_norm");
  task.k_norm = floats(k_norm, size, "k_norm");
  task.eps = float(eps);
  Tensor q = at::empty({tokens, heads, size}, qkv.options());
  task.q = q.mutable_data_ptr();
  rope_rows(task, tokens);
  return q;
}

// The sequences of a batch: which pages are theirs, and which of its rows; checked.
struct Sequences {
  int64_t count, width;
  const int32_t *tables, *starts, *contexts;

  Sequences(const Tensor& block_tables, const Tensor& query_starts, const Tensor& context_lens, int64_t rows,
            int64_t pages, bool causal = true) {
    TORCH_CHECK_VALUE(block_tables.dim() == 2, "block_tables must be (sequences, pages)");
    count = block_tables.size(0), width = block_tables.size(1);
    tables = integers<int32_t>(block_tables, count * width, "block_tables");
    starts = integers<int32_t>(query_starts, count + 1, "query_starts");
    contexts = integers<int32_t>(context_lens, count, "context_lens");
    check(rows, pages, causal);
  }

  Sequences(int64_t count, int64_t width, const int32_t* tables, const int32_t* starts, const int32_t* contexts,
            int64_t rows, int64_t pages)
      : count(count), width(width), tables(tables), starts(starts), contexts(contexts) {
    check(rows, pages, true);
  }

 private:
  void check(int64_t rows, int64_t pages, bool causal) const {
    TORCH_CHECK_INDEX(starts[0] == 0 && starts[count] == rows, "query_starts does not cover the ", rows, " queries");
    for (int64_t b = 0; b < count; b++) {
      const int64_t queries = starts[b + 1] - starts[b], used = up(contexts[b], PAGE) / PAGE;
      const int64_t fewest = causal ? queries : queries > 0;
      TORCH_CHECK_INDEX(queries >= 0 && contexts[b] >= fewest && used <= width, "sequence ", b, " has ", queries,
                        " queries, a context of ", contexts[b], " and room for ", width * PAGE);
      for (int64_t i = 0; i < used; i++)
        TORCH_CHECK_INDEX(tables[b * width + i] >= 0 && tables[b * width + i] < pages, "page ", tables[b * width + i],
                          " of sequence ", b, " is beyond the ", pages, " pages");
    }
  }
};

// How the attention of a batch is divided, which is the same in every layer.
class Pieces {
 public:
  int64_t sums = 0;  // floats for the sums of stretches, where too few pieces are divided by them

  Pieces(const Sequences& all, int64_t group, int64_t kv_heads, int64_t sums_size) : all(all) {
    for (int64_t b = 0; b < all.count; b++) {
      // The longest pieces (the last queries see the most keys) come first, so that no thread is left with one at the
      // end.
      constexpr int64_t ROWS = 64;
      for (int64_t end = (all.starts[b + 1] - all.starts[b]) * group; end > 0; end -= ROWS)
        for (int64_t h = 0; h < kv_heads; h++) pieces.push_back({b, h, std::max<int64_t>(0, end - ROWS), end, 0});
    }
    if (int64_t(pieces.size()) >= 2 * threads()) return;
    int64_t room = 0;
    for (Piece& piece : pieces) {
      piece.sums = room;
      for (int64_t key = 0; key < all.contexts[piece.sequence]; key += tw::STRETCH) {
        parts.push_back({int64_t(&piece - pieces.data()), key, room});
        room += (piece.end - piece.begin) * sums_size;
      }
    }
    if (parts.size() > pieces.size()) sums = room;
  }

  // `task` lacks what is a sequence's; `memory` has room for the sums.
  void attend(const tw::AttentionTask& task, float* memory) const {
    const auto& k = kernels();
    const auto of = [&](const Piece& piece) {
      tw::AttentionTask part = task;
      part.kv_head = piece.kv_head;
      part.table = all.tables + piece.sequence * all.width;
      part.first_query = all.starts[piece.sequence];
      part.queries = all.starts[piece.sequence + 1] - all.starts[piece.sequence];
      part.context = part.last_key = all.contexts[piece.sequence];
      return part;
    };
    if (!sums)
      return each(int64_t(pieces.size()),
                  [&](int64_t i) { k.attention(of(pieces[i]), pieces[i].begin, pieces[i].end); });
    each(int64_t(parts.size()), [&](int64_t i) {
      const Piece& piece = pieces[parts[i].piece];
      tw::AttentionTask part = of(piece);
      part.first_key = parts[i].first_key;
      part.last_key = std::min<int64_t>(part.context, part.first_key + tw::STRETCH);
      part.sums = memory + parts[i].sums;
      k.attention(part, piece.begin, piece.end);
    });
    each(int64_t(pieces.size()), [&](int64_t i) {
      tw::AttentionTask whole = of(pieces[i]);
      whole.sums = memory + pieces[i].sums;
      k.add_stretches(whole, pieces[i].begin, pieces[i].end, (whole.context + tw::STRETCH - 1) / tw::STRETCH);
    });
  }

 private:
  struct Piece {
    int64_t sequence, kv_head, begin, end, sums;
  };
  struct Part {
    int64_t piece, first_key, sums;
  };
  const Sequences& all;
  std::vector<Piece> pieces;
  std::vector<Part> parts;
};

tw::AttentionTask attention_task(const Pages& pages, int64_t heads, double scale, int64_t window, double soft_cap,
                                 bool causal, const optional<Tensor>& bias = std::nullopt) {
  TORCH_CHECK_VALUE(window >= 0, "window is ", window, "; 0 for none or a number of keys is wanted");
  TORCH_CHECK_VALUE(soft_cap >= 0, "soft_cap is ", soft_cap, "; 0 for none or a positive number is wanted");
  tw::AttentionTask task{};
  pages.into(task);
  task.heads = heads;
  task.scale = float(scale);
  task.soft_cap = float(soft_cap);
  task.window = window;
  task.causal = causal;
  if (bias) {
    constexpr int64_t SPAN = 4 * PAGE;  // the kernel reads whole ones
    TORCH_CHECK_VALUE(bias->dim() == 2 && bias->size(0) == heads && bias->size(1) % (2 * SPAN) == 0,
                      "a bias of shape ", bias->sizes(), " is not (", heads, ", a multiple of ", 2 * SPAN, ")");
    task.bias = floats(*bias, bias->numel(), "bias");
    task.reach = bias->size(1) / 2;
  }
  return task;
}

void check_reach(const tw::AttentionTask& task, const Sequences& sequences) {
  for (int64_t b = 0; task.bias && b < sequences.count; b++)
    TORCH_CHECK_INDEX(sequences.contexts[b] <= task.reach, "sequence ", b, " of ", sequences.contexts[b],
                      " tokens is longer than the ", task.reach, " of the bias");
}

Tensor paged_attention(const Tensor& q_in, const Tensor& k_pages, const Tensor& v_pages,
                       const optional<Tensor>& k_scale, const optional<Tensor>& v_scale, const Tensor& block_tables,
                       const Tensor& query_starts, const Tensor& context_lens, double scale, int64_t window,
                       double soft_cap, bool causal, const optional<Tensor>& bias,
                       const optional<Tensor>& sinks) {
  const Tensor q = q_in.contiguous();
  const Pages pages(k_pages, v_pages, k_scale, v_scale);
  TORCH_CHECK_VALUE(q.dim() == 3 && q.size(2) == pages.head_size && q.size(1) % pages.heads == 0,
                    "q of shape ", q.sizes(), " does not fit ", pages.heads, " key heads of ", pages.head_size);
  tw::AttentionTask task = attention_task(pages, q.size(1), scale, window, soft_cap, causal, bias);
  const Sequences sequences(block_tables, query_starts, context_lens, q.size(0), pages.count, causal);
  check_reach(task, sequences);
  if (sinks) task.sinks = floats(*sinks, q.size(1), "sinks");
  Tensor out = at::empty_like(q);
  task.q = q.const_data_ptr();
  task.q_type = float_type(q, "q");
  task.out = out.mutable_data_ptr();
  const Pieces pieces(sequences, q.size(1) / pages.heads, pages.heads, task.sums_size());
  const Tensor sums = at::empty({pieces.sums}, q.options().dtype(at::kFloat));
  pieces.attend(task, sums.mutable_data_ptr<float>());
  return out;
}

// Rows (N, K), K a multiple of the group: (int8 (N, K), int8 multipliers (N, K / group), float32 scale (N,)).
std::tuple<Tensor, Tensor, Tensor> quantize_w4(const Tensor& weight, const Tensor& importance, int64_t group_size) {
  check_group(group_size);
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) % group_size == 0, "weight of shape ", weight.sizes(),
                    " is not rows of whole groups of ", group_size);
  const int64_t rows = weight.size(0), features = weight.size(1);
  const float* w = floats(weight, rows * features, "weight");
  const float* h = floats(importance, features, "importance");
  Tensor integers = at::empty({rows, features}, weight.options().dtype(at::kChar));
  Tensor multipliers = at::empty({rows, features / group_size}, weight.options().dtype(at::kChar));
  Tensor scale = at::empty({rows}, weight.options());
  const auto& k = kernels();
  each_row(rows, 64 * features, [&](int64_t row) {
    k.quantize_w4(w + row * features, h, features, group_size, integers.mutable_data_ptr<int8_t>() + row * features,
                  multipliers.mutable_data_ptr<int8_t>() + row * (features / group_size),
                  scale.mutable_data_ptr<float>() + row);
  });
  return {integers, multipliers, scale};
}

}  // namespace

TORCH_LIBRARY(torchwright, m) {
  m.def("isa() -> str", isa);
  m.def("isas() -> str[]", isas);
  m.def("use_isa(str name) -> ()", use_isa);
  m.def("reads_tiles() -> bool", reads_tiles);
  m.def("own_threads(int count) -> int", own_threads);
  m.def("linear_w8a8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int features) -> Tensor");
  m.def("linear_w4a8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int features, int group_size) -> Tensor");
  m.def("linear_w4a16(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int features, int group_size) -> Tensor");
  m.def("quantize_w4(Tensor weight, Tensor importance, int group_size) -> (Tensor, Tensor, Tensor)");
  m.def("linear_bf16(Tensor x, Tensor weight, Tensor? bias, int features) -> Tensor");
  m.def("linear_heads(Tensor x, Tensor weight, int features) -> Tensor");
  m.def(
      "linear_grouped(Tensor x, Tensor weight, Tensor? bias, int features, int group_size, int bits, bool floats=False, "
      "int layout=0) -> Tensor");
  m.def("gated(Tensor x, str kind) -> Tensor");
  m.def("activate(Tensor x, str kind) -> Tensor");
  m.def(
      "rope_store(Tensor qkv, Tensor cos, Tensor sin, Tensor positions, Tensor slots, Tensor(a!) k_pages, "
      "Tensor(b!) v_pages, Tensor(c!)? k_scale, Tensor(d!)? v_scale, int heads, int kv_heads, Tensor? q_norm, "
      "Tensor? k_norm, float eps) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor? k_scale, Tensor? v_scale, "
      "Tensor block_tables, Tensor query_starts, Tensor context_lens, float scale, int window, float soft_cap, "
      "bool causal=True, Tensor? bias=None, Tensor? sinks=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchwright, CPU, m) {
  m.impl("linear_w8a8", linear_w8a8);
  m.impl("linear_w4a8", linear_w4a8);
  m.impl("linear_w4a16", linear_w4a16);
  m.impl("linear_bf16", linear_bf16);
  m.impl("linear_grouped", linear_grouped);
  m.impl("linear_heads", linear_heads);
  m.impl("quantize_w4", quantize_w4);
  m.impl("gated", gated);
  m.impl("activate", activate);
  m.impl("rope_store", rope_store);
  m.impl("paged_attention", paged_attention);
}

#include "norm_ops.cpp"
#include "encoder_ops.cpp"
#include "conv_ops.cpp"
#include "low_rank_ops.cpp"
#include "recurrent_ops.cpp"
#include "cells_ops.cpp"
#include "route_ops.cpp"
#include "decode_plan.h"
#include "decode_rows.cpp"
#include "decode_blocks.cpp"
#include "decode_experts.cpp"
#include "decode_drafts.cpp"
#include "decode_ops.cpp"
#include "shared_ops.cpp"
