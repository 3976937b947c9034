// Memory that processes share, as a class of PyTorch. ops.cpp takes this in.
#include "shared_memory.h"

namespace {

class SharedMemory : public torch::CustomClassHolder {
 public:
  SharedMemory(const std::string& path, int64_t rank, int64_t ways, int64_t room, double patience)
      : memory(path, checked(rank, ways, room), ways, room, patience) {}

  static int64_t size(int64_t ways, int64_t room) { return tw::SharedMemory::size(ways, room); }

  // x becomes the sum of all processes' x. Sums are made in float32, of float64 in float64, and rounded once.
  void sum(const Tensor& x) {
    const int64_t count = of_cpu(x).numel(), kind = kind_of(x, 0);
    switch (x.scalar_type()) {
      case at::kFloat: return memory.sum<float, float>(x.mutable_data_ptr<float>(), count, kind);
      case at::kDouble: return memory.sum<double, double>(x.mutable_data_ptr<double>(), count, kind);
      case at::kBFloat16:
        return memory.sum<at::BFloat16, float>(x.mutable_data_ptr<at::BFloat16>(), count, kind);
      default: TORCH_CHECK_VALUE(false, "x is float32, float64 or bfloat16, not ", x.scalar_type());
    }
  }

  // (ways, *x.shape): what each process has in x, of the same shape in all.
  Tensor gather(const Tensor& x) {
    std::vector<int64_t> shape = of_cpu(x).sizes().vec();
    shape.insert(shape.begin(), memory.ways);
    const Tensor all = at::empty(shape, x.options());
    memory.gather((const char*)x.const_data_ptr(), (char*)all.mutable_data_ptr(), x.nbytes(), kind_of(x, 1));
    return all;
  }

 private:
  static int64_t checked(int64_t rank, int64_t ways, int64_t room) {
    TORCH_CHECK_VALUE(ways > 0 && ways <= tw::SharedMemory::MOST_WAYS && rank >= 0 && rank < ways, "rank ", rank, " of ",
                      ways);
    TORCH_CHECK_VALUE(room > 0 && room % tw::SharedMemory::LINE == 0, "slots of ", room, " bytes are not whole lines of ",
                      tw::SharedMemory::LINE);
    return rank;
  }

  static const Tensor& of_cpu(const Tensor& x) {
    TORCH_CHECK_VALUE(x.is_contiguous() && x.device().is_cpu(), "x is a contiguous tensor on the CPU");
    return x;
  }

  // Of what kind the exchanged numbers are, below 256.
  static int64_t kind_of(const Tensor& x, int64_t call) { return int64_t(x.scalar_type()) * 2 + call; }

  tw::SharedMemory memory;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchwright, m) {
  m.class_<SharedMemory>("SharedMemory")
      .def(torch::init<const std::string&, int64_t, int64_t, int64_t, double>())
      .def_static("size", &SharedMemory::size)
      .def("sum", &SharedMemory::sum)
      .def("gather", &SharedMemory::gather);
}
