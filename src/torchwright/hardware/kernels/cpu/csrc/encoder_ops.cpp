// The operators of encoders; ops.cpp takes this in, whose helpers it uses.
#include "encoder.h"

namespace {

// activation(x Wᵀ + b) + residual, each row of x quantized about the middle of its range; `sums` are those of the rows
// of W.
Tensor linear_w8a8_fused(const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor& sums,
                         const optional<Tensor>& bias, int64_t features, c10::string_view activation,
                         const optional<Tensor>& residual_in) {
  TORCH_CHECK_VALUE(features > 0, "features is ", features, "; a positive number is wanted");
  const Tensor centers = at::empty({row_count(x)}, at::kFloat);
  tw::FinishTask task{};
  task.centers = centers.const_data_ptr<float>();
  task.sums = floats(sums, up(features, PANEL), "sums");
  task.type = float_type(x, "x");
  task.activation = activation_of(activation);
  task.stride = features;
  Tensor residual;
  if (residual_in) {
    auto sizes = x.sizes().vec();
    sizes.back() = features;
    TORCH_CHECK_VALUE(residual_in->sizes() == at::IntArrayRef(sizes) && residual_in->scalar_type() == x.scalar_type(),
                      "residual is ", residual_in->scalar_type(), residual_in->sizes(), "; the output is ",
                      x.scalar_type(), at::IntArrayRef(sizes));
    residual = residual_in->contiguous();
    task.residual = residual.const_data_ptr();
  }
  const auto quantize = [&](const tw::Kernels& k, const void* rows, Type type, int64_t width, int64_t row,
                            const tw::QuantizedRows& to) {
    k.quantize_centered(rows, type, width, row, to, centers.data_ptr<float>());
  };
  const auto finish = [&](const tw::Kernels& k, const tw::LinearTask& part) {
    tw::FinishTask here = task;
    here.out = part.out;
    k.finish(here, part.row_begin, part.row_end, part.panel_begin * PANEL,
             std::min(part.panel_end * PANEL, part.features));
  };
  return linear(x, packed_integers(weight, scale, bias, width_of(x), features, 0, 1), quantize, finish);
}

tw::DenseAttentionTask::Side side(const Tensor& x, const char* what) {
  TORCH_CHECK_VALUE(x.dim() == 4 && x.stride(3) == 1, what, " of shape ", x.sizes(), " and strides ", x.strides(),
                    " is not (batch, heads, tokens, features) with features side by side");
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

Tensor readable(const Tensor& x) { return x.dim() == 4 && x.stride(3) != 1 ? x.contiguous() : x; }

// Operands (B, H, T, D) of any strides, which must outlive it.
tw::DenseAttentionTask attention_task(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  tw::DenseAttentionTask task{};
  task.type = float_type(q, "q");
  task.q = side(q, "q");
  task.k = side(k, "k");
  task.v = side(v, "v");
  task.heads = q.size(1);
  task.queries = q.size(2);
  task.head_size = q.size(3);
  task.keys = k.size(2);
  task.scale = float(scale);
  TORCH_CHECK_VALUE(task.head_size > 0 && task.head_size % 16 == 0 && task.head_size <= tw::LARGEST_HEAD,
                    "heads of ", task.head_size, " features; multiples of 16 up to ", tw::LARGEST_HEAD, " are wanted");
  TORCH_CHECK_VALUE(k.sizes() == at::IntArrayRef({q.size(0), task.heads, task.keys, task.head_size}) &&
                        v.sizes() == k.sizes(),
                    "k of shape ", k.sizes(), " and v of shape ", v.sizes(), " do not fit q of shape ", q.sizes());
  return task;
}

// The same (B, H, T, D) as q, lying as (B, T, H, D).
Tensor attend(tw::DenseAttentionTask task, const Tensor& q) {
  Tensor out = at::empty({q.size(0), task.queries, task.heads, task.head_size}, q.options());
  task.out = out.mutable_data_ptr();
  if (out.numel() && task.keys) {
    // Pieces of queries share what is packed of their head: more than one only where the threads want more to do.
    constexpr int64_t FEWEST = 48;
    const int64_t heads = q.size(0) * task.heads, wanted = up(PIECES * threads(), heads) / heads;
    const int64_t pieces = std::max<int64_t>(1, std::min(wanted, task.queries / FEWEST));
    const auto& kernel = kernels();
    each(heads * pieces, [&](int64_t i) {
      const int64_t head = i / pieces, piece = i % pieces;
      kernel.dense_attention(task, head / task.heads, head % task.heads, task.queries * piece / pieces,
                             task.queries * (piece + 1) / pieces);
    });
  } else {
    out.zero_();
  }
  return out.transpose(1, 2);
}

void check_bfloat16(const Tensor& x, const char* what) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kBFloat16, what, " is ", x.scalar_type(), "; bfloat16 is wanted");
}

Tensor attention(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const optional<Tensor>& mask,
                 double scale) {
  check_bfloat16(q_in, "q");
  check_bfloat16(k_in, "k");
  check_bfloat16(v_in, "v");
  const Tensor q = readable(q_in), k = readable(k_in), v = readable(v_in);
  tw::DenseAttentionTask task = attention_task(q, k, v, scale);
  Tensor seen;
  if (mask) {
    task.mask_is_bool = mask->scalar_type() == at::kBool;
    seen = (task.mask_is_bool ? *mask : mask->to(at::kFloat)).expand({q.size(0), task.heads, task.queries, task.keys});
    task.mask = seen.const_data_ptr();
    task.mask_batch = seen.stride(0);
    task.mask_head = seen.stride(1);
    task.mask_query = seen.stride(2);
    task.mask_key = seen.stride(3);
  }
  return attend(task, q);
}

// (head_size, places from the farthest before to the farthest after, padded) of (2 · extent - 1, head_size), whose
// first vector is that of keys farthest after.
Tensor table_of_places(const Tensor& vectors, int64_t extent, int64_t head_size, const char* what) {
  TORCH_CHECK_VALUE(vectors.sizes() == at::IntArrayRef({2 * extent - 1, head_size}) && vectors.is_floating_point(),
                    what, " is ", vectors.scalar_type(), vectors.sizes(), "; a vector of ", head_size,
                    " features for each of ", 2 * extent - 1, " distances is wanted");
  Tensor table = at::empty({head_size, tw::DenseAttentionTask::table_width(extent)}, at::kFloat);
  table.zero_().narrow(1, 0, 2 * extent - 1).copy_(vectors.flip(0).t());
  return table;
}

// Attention over a grid of places, row after row, as wide as `columns` says: to the score of a query at (y, x) and a
// key at (y', x') come q · rows[y - y' + height - 1] and q · columns[x - x' + width - 1].
Tensor grid_attention(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& rows,
                      const Tensor& columns, double scale) {
  const Tensor q = readable(q_in), k = readable(k_in), v = readable(v_in);
  TORCH_CHECK_TYPE(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "q is ", q.scalar_type(),
                   ", k ", k.scalar_type(), " and v ", v.scalar_type(), "; one type is wanted");
  tw::DenseAttentionTask task = attention_task(q, k, v, scale);
  TORCH_CHECK_VALUE(rows.dim() == 2 && columns.dim() == 2, "rows of shape ", rows.sizes(), " and columns of shape ",
                    columns.sizes(), " are no tables of vectors");
  task.height = (rows.size(0) + 1) / 2;
  task.width = (columns.size(0) + 1) / 2;
  TORCH_CHECK_VALUE(task.queries == task.height * task.width && task.keys == task.queries, task.queries,
                    " queries and ", task.keys, " keys are no grid of ", task.height, " x ", task.width);
  const Tensor by_row = table_of_places(rows, task.height, task.head_size, "rows");
  const Tensor by_column = table_of_places(columns, task.width, task.head_size, "columns");
  task.by_row = by_row.const_data_ptr<float>();
  task.by_column = by_column.const_data_ptr<float>();
  return attend(task, q);
}

// A part of a sequence's queries.
struct QueryPiece {
  int64_t start, tokens, begin, end;
};

// Attention of each sequence's tokens to all of the same sequence: of qkv (tokens, 3 · heads · head_size), queries and
// keys turned by their token's angles, to (tokens, heads · head_size). Sequence b has the rows from starts[b] on.
Tensor varlen_attention(const Tensor& qkv_in, const Tensor& cos_in, const Tensor& sin_in, const Tensor& starts_in,
                        int64_t heads, double scale) {
  const Tensor qkv = qkv_in.contiguous(), cos = cos_in.contiguous(), sin = sin_in.contiguous();
  TORCH_CHECK_VALUE(qkv.dim() == 2 && heads > 0 && heads <= qkv.size(1) && qkv.size(1) % (3 * heads) == 0,
                    "qkv of shape ", qkv.sizes(), " is not queries, keys and values of ", heads, " heads");
  const int64_t tokens = qkv.size(0), size = qkv.size(1) / (3 * heads), padded = up(size, 16);
  TORCH_CHECK_VALUE(size % 2 == 0 && padded <= tw::LARGEST_HEAD, "heads of ", size,
                    " features; an even number up to ", tw::LARGEST_HEAD, " is wanted");
  TORCH_CHECK_VALUE(starts_in.dim() == 1 && starts_in.numel() > 0, "starts of shape ", starts_in.sizes(),
                    " is no list of sequences");
  const int64_t count = starts_in.numel() - 1;
  const int32_t* starts = integers<int32_t>(starts_in, count + 1, "starts");
  TORCH_CHECK_INDEX(starts[0] == 0 && starts[count] == tokens, "starts does not cover the ", tokens, " tokens");
  for (int64_t b = 0; b < count; b++)
    TORCH_CHECK_INDEX(starts[b] <= starts[b + 1], "sequence ", b, " ends before it begins");
  tw::TurnTask turn{};
  turn.cos = floats(cos, tokens * size / 2, "cos");
  turn.sin = floats(sin, tokens * size / 2, "sin");
  turn.type = float_type(qkv, "qkv");
  turn.qkv = qkv.const_data_ptr();
  turn.heads = heads, turn.head_size = size, turn.padded = padded;
  const Tensor turned = at::empty({tokens, 3, heads, padded}, qkv.options());
  turn.out = turned.mutable_data_ptr();
  const auto& kernel = kernels();
  each_row(tokens, 3 * heads * padded, [&](int64_t token) { kernel.turn_heads(turn, token); });

  Tensor out = at::empty({tokens, heads, padded}, qkv.options());
  const int64_t bytes = qkv.element_size(), row = 3 * heads * padded;
  std::vector<QueryPiece> pieces;
  for (int64_t b = 0; b < count; b++) {
    // Pieces of queries share what is packed of their head: more than one only where the threads want more to do.
    constexpr int64_t FEWEST = 48;
    const int64_t length = starts[b + 1] - starts[b], even = PIECES * threads() * length / (heads * tokens + 1) + 1;
    const int64_t parts = length ? std::max<int64_t>(1, std::min(even, length / FEWEST)) : 0;
    for (int64_t i = 0; i < parts; i++) pieces.push_back({starts[b], length, length * i / parts, length * (i + 1) / parts});
  }
  each(int64_t(pieces.size()) * heads, [&](int64_t i) {
    const QueryPiece& piece = pieces[i / heads];
    const char* at = (const char*)turned.const_data_ptr() + piece.start * row * bytes;
    tw::DenseAttentionTask task{};
    task.type = turn.type;
    task.q = {at, 0, padded, row};
    task.k = {at + heads * padded * bytes, 0, padded, row};
    task.v = {at + 2 * heads * padded * bytes, 0, padded, row};
    task.out = (char*)out.mutable_data_ptr() + piece.start * heads * padded * bytes;
    task.queries = task.keys = piece.tokens;
    task.heads = heads, task.head_size = padded, task.scale = float(scale);
    kernel.dense_attention(task, 0, i % heads, piece.begin, piece.end);
  });
  if (padded != size) out = out.narrow(2, 0, size);
  return out.reshape({tokens, heads * size});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.def(
      "linear_w8a8_fused(Tensor x, Tensor weight, Tensor scale, Tensor sums, Tensor? bias, int features, str activation, "
      "Tensor? residual) -> Tensor");
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor");
  m.def("varlen_attention(Tensor qkv, Tensor cos, Tensor sin, Tensor starts, int heads, float scale) -> Tensor");
  m.def("grid_attention(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor columns, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchwright, CPU, m) {
  m.impl("linear_w8a8_fused", linear_w8a8_fused);
  m.impl("attention", attention);
  m.impl("varlen_attention", varlen_attention);
  m.impl("grid_attention", grid_attention);
}
