// Adapters and the rows of a batch that they change, as classes of PyTorch. ops.cpp takes this in, whose helpers it uses.
#include <torch/custom_class.h>

namespace {

constexpr int64_t LANES = 16;

// An adapter's pair of matrices for one linear layer.
struct LowRank {
  Tensor a, b;  // whose memory the blocks point to
  int64_t width = 0, features = 0, ranks = 0;
  std::vector<tw::LowRankBlock> blocks;
};

// Low-rank matrices by place, four to a layer: qkv, o, gate_up (or up), down.
class Adapter : public torch::CustomClassHolder {
 public:
  // `a` is (ranks / 16, width / 2, 16, 2), `b` the blocks of sixteen features one after another, each (pairs of ranks,
  // 16, 2); both are padded with zeros. `segments` are, for each run of blocks that reads the same ranks, the block
  // behind it, its first rank and its pairs of ranks.
  void add(int64_t place, const Tensor& a, const Tensor& b, int64_t width, int64_t features,
           const std::vector<int64_t>& segments) {
    TORCH_CHECK_VALUE(place >= 0 && width > 0 && features > 0, "place ", place, " of ", width, " to ", features,
                      " features is none");
    LowRank part{a, b, width, features};
    const int64_t lines = up(width, 2) / 2, panel = 2 * LANES;
    for (const Tensor& tensor : {a, b})
      TORCH_CHECK_VALUE(tensor.scalar_type() == at::kBFloat16 && tensor.is_contiguous(),
                        "an adapter's matrices are contiguous bfloat16 tensors, not ", tensor.scalar_type());
    TORCH_CHECK_VALUE(a.numel() % (lines * panel) == 0, "A has ", a.numel(), " values, not whole blocks of ",
                      lines * panel);
    part.ranks = a.numel() / (lines * panel) * LANES;
    const auto* from = (const uint16_t*)b.const_data_ptr();
    int64_t used = 0;
    TORCH_CHECK_VALUE(segments.size() % 3 == 0, "segments are three numbers each");
    for (size_t i = 0; i < segments.size(); i += 3) {
      const int64_t end = segments[i], first = segments[i + 1], pairs = segments[i + 2];
      TORCH_CHECK_VALUE(first >= 0 && pairs >= 0 && first + 2 * pairs <= part.ranks && end <= up(features, LANES) / LANES,
                        "a segment of ", pairs, " pairs from rank ", first, " to block ", end, " does not fit");
      while (int64_t(part.blocks.size()) < end) {
        TORCH_CHECK_VALUE(used + pairs * panel <= b.numel(), "B has ", b.numel(), " values, too few for its segments");
        part.blocks.push_back({from + used, first, pairs});
        used += pairs * panel;
      }
    }
    TORCH_CHECK_VALUE(int64_t(part.blocks.size()) * LANES == up(features, LANES) && used == b.numel(), "B has ",
                      b.numel(), " values for ", features, " features; its segments take ", used);
    if (place >= int64_t(parts.size())) parts.resize(place + 1);
    parts[place] = std::move(part);
  }

  const LowRank* at(int64_t place) const {
    return place < int64_t(parts.size()) && parts[place].ranks ? &parts[place] : nullptr;
  }

 private:
  std::vector<LowRank> parts;
};

using Adapters = std::vector<c10::intrusive_ptr<Adapter>>;

// The rows of a batch that adapters change; a row has at most one.
class AdaptedRows : public torch::CustomClassHolder {
 public:
  AdaptedRows(const Adapters& adapters, const std::vector<Tensor>& rows) : adapters(adapters), rows(rows) {
    TORCH_CHECK_VALUE(adapters.size() == rows.size(), adapters.size(), " adapters and the rows of ", rows.size());
    for (const Tensor& some : rows) {
      const int64_t* numbers = integers<int64_t>(some, some.numel(), "rows");
      for (int64_t i = 0; i < some.numel(); i++) {
        TORCH_CHECK_INDEX(numbers[i] >= 0, "row ", numbers[i], " is none");
        last = std::max(last, numbers[i]);
      }
    }
  }

  // y += B A x at a place, for the rows of the adapters that have one there.
  void add(int64_t place, const Tensor& y, const Tensor& x) {
    for (const Tensor& tensor : {y, x})
      TORCH_CHECK_VALUE(tensor.scalar_type() == at::kBFloat16 && tensor.is_contiguous() && tensor.dim() == 2,
                        "y and x are contiguous matrices of bfloat16");
    TORCH_CHECK_VALUE(y.size(0) == x.size(0), "y has ", y.size(0), " rows and x ", x.size(0));
    add(place, y.mutable_data_ptr(), x.const_data_ptr(), x.size(0), x.size(1), y.size(1));
  }

  void add(int64_t place, void* y, const void* x, int64_t count, int64_t width, int64_t features) {
    TORCH_CHECK_INDEX(last < count, "row ", last, " is beyond the ", count, " of the batch");
    std::vector<tw::LowRankTask> tasks;
    int64_t size = 0;
    for (size_t i = 0; i < adapters.size(); i++) {
      const LowRank* part = adapters[i]->at(place);
      if (!part) continue;
      TORCH_CHECK_VALUE(part->width == width && part->features == features, "an adapter of ", part->width, " to ",
                        part->features, " features is where one of ", width, " to ", features, " is wanted");
      tw::LowRankTask task{};
      task.a = (const uint16_t*)part->a.const_data_ptr();
      task.blocks = part->blocks.data();
      task.x = (const uint16_t*)x, task.y = (uint16_t*)y;
      task.rows = rows[i].const_data_ptr<int64_t>(), task.count = rows[i].numel();
      task.width = width, task.features = features, task.ranks = part->ranks;
      size += task.count * task.ranks;
      tasks.push_back(task);
    }
    if (int64_t(middle.size()) < size) middle.resize(size);
    uint16_t* free = middle.data();
    for (tw::LowRankTask& task : tasks) task.middle = free, free += task.count * task.ranks;
    compute(tasks, features);
  }

 private:
  struct Shrink {
    size_t task;
    int64_t begin, end, block;
  };

  static void compute(const std::vector<tw::LowRankTask>& tasks, int64_t features) {
    // Of a piece: few, so that threads share them, and enough to read a block of A once for several.
    constexpr int64_t ROWS = 8;
    const auto& k = kernels();
    std::vector<Shrink> pieces;
    for (size_t i = 0; i < tasks.size(); i++)
      for (int64_t begin = 0; begin < tasks[i].count; begin += ROWS)
        for (int64_t block = 0; block < tasks[i].ranks / LANES; block++)
          pieces.push_back({i, begin, std::min(begin + ROWS, tasks[i].count), block});
    if (pieces.empty()) return;
    each(pieces.size(), [&](int64_t i) {
      k.low_rank_shrink(tasks[pieces[i].task], pieces[i].begin, pieces[i].end, pieces[i].block);
    });
    const int64_t blocks = up(features, LANES) / LANES, count = tasks.size();
    const int64_t parts = std::min(blocks, up(PIECES * threads(), count) / count);
    each(count * parts, [&](int64_t i) {
      const int64_t part = i % parts;
      k.low_rank_expand(tasks[i / parts], blocks * part / parts, blocks * (part + 1) / parts);
    });
  }

  const Adapters adapters;
  const std::vector<Tensor> rows;
  int64_t last = -1;
  std::vector<uint16_t> middle;  // A x of all rows
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.class_<Adapter>("Adapter").def(torch::init<>()).def("add", &Adapter::add);
  m.class_<AdaptedRows>("AdaptedRows")
      .def(torch::init<const Adapters&, const std::vector<Tensor>&>())
      .def("add", static_cast<void (AdaptedRows::*)(int64_t, const Tensor&, const Tensor&)>(&AdaptedRows::add));
}
