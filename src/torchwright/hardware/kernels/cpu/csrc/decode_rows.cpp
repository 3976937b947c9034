// The program's operations on single numbers and rows: tables, sums, products, norms, activations. ops.cpp takes this in.
namespace {

// to = function(from), number by number.
template <class Function>
void DecodePlan::map(const Ints& from_cells, const Ints& to_cells, Function function) {
  const Cells from = cells(from_cells), to = cells(to_cells);
  TORCH_CHECK_VALUE(from.width == to.width, "rows of ", from.width, " numbers do not fit rows of ", to.width);
  push([=, this](const Step& now) {
    typed([&](auto* kind) {
      using T = std::remove_pointer_t<decltype(kind)>;
      each_row(now.rows, to.width, [&](int64_t row) {
        const T* x = (const T*)cell(now, from, row);
        T* out = (T*)cell(now, to, row);
        for (int64_t i = 0; i < to.width; i++) out[i] = T(function(float(x[i]), i));
      });
    });
  });
}

// to = function(a, b), number by number; b may be one number a row.
template <class Function>
void DecodePlan::map(const Ints& a_cells, const Ints& b_cells, const Ints& to_cells, Function function) {
  const Cells a = cells(a_cells), b = cells(b_cells), to = cells(to_cells);
  TORCH_CHECK_VALUE(a.width == to.width && (b.width == to.width || b.width == 1), "rows of ", a.width, " and ", b.width,
                    " numbers do not fit rows of ", to.width);
  push([=, this](const Step& now) {
    typed([&](auto* kind) {
      using T = std::remove_pointer_t<decltype(kind)>;
      each_row(now.rows, to.width, [&](int64_t row) {
        const T *x = (const T*)cell(now, a, row), *y = (const T*)cell(now, b, row);
        T* out = (T*)cell(now, to, row);
        const float only = float(y[0]);
        if (b.width == 1 && to.width > 1)
          for (int64_t i = 0; i < to.width; i++) out[i] = T(function(float(x[i]), only));
        else
          for (int64_t i = 0; i < to.width; i++) out[i] = T(function(float(x[i]), float(y[i])));
      });
    });
  });
}

void DecodePlan::lookup(const Tensor& table, double factor, const Ints& to_cells) {
  const Cells to = dense(to_cells, "a table's row");
  TORCH_CHECK_VALUE(float_type(table, "a table") == type && table.dim() == 2 && table.is_contiguous() &&
                        table.size(1) == to.width,
                    "a table of shape ", table.sizes(), " is not contiguous rows of ", to.width);
  vocabulary = vocabulary < 0 ? table.size(0) : std::min(vocabulary, table.size(0));
  keep(table);
  const char* rows = (const char*)table.const_data_ptr();
  push([=, this](const Step& now) {
    for (int64_t row = 0; row < now.rows; row++)
      std::memcpy(cell(now, to, row), rows + now.tokens[row] * to.width * element, to.width * element);
  });
  if (factor != 1) scale(factor, to_cells, to_cells);
}

// Adds a table's row of each position.
void DecodePlan::places(const Tensor& table, const Ints& to_cells) {
  const Cells to = dense(to_cells, "a position's row");
  TORCH_CHECK_VALUE(float_type(table, "positions") == type && table.dim() == 2 && table.is_contiguous() &&
                        table.size(1) == to.width,
                    "positions of shape ", table.sizes(), " are not contiguous rows of ", to.width);
  place_count = place_count < 0 ? table.size(0) : std::min(place_count, table.size(0));
  keep(table);
  push([=, this](const Step& now) {
    typed([&](auto* kind) {
      using T = std::remove_pointer_t<decltype(kind)>;
      for (int64_t row = 0; row < now.rows; row++) {
        const T* place = (const T*)table.const_data_ptr() + now.turns[0].positions[row] * to.width;
        T* out = (T*)cell(now, to, row);
        for (int64_t i = 0; i < to.width; i++) out[i] = T(float(out[i]) + float(place[i]));
      }
    });
  });
}

// `parts` of `size` numbers each, `from_step` and `to_step` apart. `halves`: of each part the numbers at even places
// come first, as kernels want the dimensions that turn.
void DecodePlan::copy(const Ints& from_cells, int64_t from_step, const Ints& to_cells, int64_t to_step, int64_t parts,
                      int64_t size, bool halves) {
  const Cells from = cells(from_cells), to = cells(to_cells);
  TORCH_CHECK_VALUE(parts > 0 && size > 0 && from_step >= 0 && to_step >= 0 &&
                        (parts - 1) * from_step + size <= from.width && (parts - 1) * to_step + size <= to.width &&
                        (!halves || size % 2 == 0),
                    parts, " parts of ", size, " numbers do not fit rows of ", from.width, " and ", to.width);
  push([=, this](const Step& now) {
    typed([&](auto* kind) {
      using T = std::remove_pointer_t<decltype(kind)>;
      each_row(now.rows, parts * size, [&](int64_t row) {
        for (int64_t part = 0; part < parts; part++) {
          const T* x = (const T*)cell(now, from, row) + part * from_step;
          T* out = (T*)cell(now, to, row) + part * to_step;
          if (halves)
            for (int64_t i = 0; i < size / 2; i++) out[i] = x[2 * i], out[size / 2 + i] = x[2 * i + 1];
          else
            std::memcpy(out, x, size * sizeof(T));
        }
      });
    });
  });
}

void DecodePlan::add(const Ints& a, const Ints& b, const Ints& to) {
  map(a, b, to, [](float x, float y) { return x + y; });
}

void DecodePlan::multiply(const Ints& a, const Ints& b, const Ints& to) {
  map(a, b, to, [](float x, float y) { return x * y; });
}

void DecodePlan::scale(double factor, const Ints& from, const Ints& to) {
  map(from, to, [by = float(factor)](float x, int64_t) { return x * by; });
}

// By a factor for each column.
void DecodePlan::scale_by(const Tensor& factors, const Ints& from, const Ints& to) {
  const float* by = floats(factors, cells(to).width, "factors");
  keep(factors);
  map(from, to, [by](float x, int64_t i) { return x * by[i]; });
}

void DecodePlan::clamp(double limit, const Ints& both) {
  map(both, both, [most = float(limit)](float x, int64_t) { return x < -most ? -most : x > most ? most : x; });
}

// Each part of a row that is as wide as the weight.
void DecodePlan::norm(const Tensor& weight, double eps, const Ints& from_cells, const Ints& to_cells) {
  const Cells from = cells(from_cells), to = cells(to_cells);
  const int64_t size = weight.numel();
  TORCH_CHECK_VALUE(size > 0 && from.width % size == 0 && from.width == to.width, "a norm of ", size,
                    " numbers does not fit rows of ", from.width, " and ", to.width);
  const float* by = floats(weight, size, "the norm");
  keep(weight);
  push([=, this](const Step& now) {
    const auto& k = kernels();
    each_row(now.rows, from.width, [&](int64_t row) {
      tw::NormTask parts{.weight = by, .type = type, .features = size, .eps = float(eps)};
      parts.x = cell(now, from, row), parts.out = cell(now, to, row);
      for (int64_t part = 0; part < from.width / size; part++) k.norm(parts, part);
    });
  });
}

// Adds what the last block has computed to the stream, and normalizes the sum.
void DecodePlan::join(const Tensor& weight, double eps, const Ints& delta_cells, const Ints& stream_cells,
                      const Ints& to_cells) {
  const Cells delta = dense(delta_cells, "delta"), stream = dense(stream_cells, "stream"), to = dense(to_cells, "x");
  TORCH_CHECK_VALUE(delta.width == stream.width && to.width == stream.width, "rows of ", delta.width, ", ", stream.width,
                    " and ", to.width, " numbers are not added");
  const float* by = floats(weight, to.width, "the norm");
  keep(weight);
  push([=, this](const Step& now) {
    const auto& k = kernels();
    char* sum = cell(now, stream);
    const tw::NormTask rows{.x = cell(now, delta), .residual = sum, .weight = by, .out = cell(now, to), .sum = sum,
                            .type = type, .features = to.width, .eps = float(eps)};
    each_row(now.rows, to.width, [&](int64_t row) { k.norm(rows, row); });
  });
}

void DecodePlan::gated(const std::string& kind, const Ints& from_cells, const Ints& to_cells) {
  const Cells from = dense(from_cells, "gate and value"), to = dense(to_cells, "their product");
  const tw::Activation activation = gate_of(kind);
  TORCH_CHECK_VALUE(from.width == 2 * to.width, "gate and value of ", from.width, " numbers for ", to.width);
  push([=, this](const Step& now) {
    gated_rows(cell(now, from), cell(now, to), type, to.width, now.rows, activation);
  });
}

void DecodePlan::activate(const std::string& kind, const Ints& from_cells, const Ints& to_cells) {
  const Cells from = cells(from_cells), to = cells(to_cells);
  const tw::Activation activation = activation_of(kind);
  TORCH_CHECK_VALUE(from.width == to.width, "rows of ", from.width, " numbers for rows of ", to.width);
  push([=, this](const Step& now) {
    const auto& k = kernels();
    each_row(now.rows, 4 * to.width, [&](int64_t row) {
      k.activate_row(cell(now, from, row), cell(now, to, row), type, to.width, 0, activation);
    });
  });
}

}  // namespace
