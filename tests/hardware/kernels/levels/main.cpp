// Without an argument: the instruction sets that this machine has. With one's name: compares its kernels with `portable`
// and with the definition of their products; anything that differs is named, and the exit code is 1.
#include <algorithm>

#include "harness.h"
#include "levels.h"

namespace levels {

// Of outputs whose products of bfloat16 are rounded differently: two steps of a bfloat16 near the largest.
constexpr double TOLERANCE = 0x1p-6;

struct Count {
  int64_t same = 0, close = 0, wrong = 0;
  double farthest = 0;
};

void compare(const Case& one, const Kernels& found, const Kernels& wanted, bool exact, Count& count) {
  const auto left = one.run(found), right = one.run(wanted);
  bool same = left.size() == right.size(), idle = true;
  double apart = same ? 0 : INFINITY;
  for (const Written& out : right)
    for (const char byte : out.bytes) idle = idle && !byte;
  for (size_t i = 0; i < left.size() && i < right.size(); i++) {
    if (left[i].bytes == right[i].bytes) continue;
    same = false;
    apart = std::max(apart, distance(left[i], right[i]));
  }
  if (idle) {
    count.wrong++;
    std::printf("%s: %s writes nothing\n", found.name, one.name.c_str());
  } else if (same) {
    count.same++;
  } else if (!exact && one.pairs && apart <= TOLERANCE) {
    count.close++;
    count.farthest = std::max(count.farthest, apart);
  } else {
    count.wrong++;
    std::printf("%s: %s differs by %g of its largest\n", found.name, one.name.c_str(), apart);
  }
}

int check(const Kernels& k, const Kernels& portable) {
  const std::string name = k.name;
  const bool bfdot = name == "bf16", exact = !bfdot;
  Count count;
  for (const auto& cases : {linear_cases(), attention_cases(), layer_cases(), convolution_cases()})
    for (const Case& one : cases) compare(one, k, portable, exact, count);
  const int64_t products = check_products(k, bfdot ? Pairs::bfdot : Pairs::fused);
  std::printf("%s: %ld cases equal portable, %ld are within %g, %ld differ; %ld products differ from their definition\n",
              k.name, long(count.same), long(count.close), count.farthest, long(count.wrong), long(products));
  return count.wrong || products;
}

}  // namespace levels

int main(int count, char** words) {
  const auto all = tw::runnable();
  const tw::Kernels& portable = *all.back().second();
  if (count == 1) {
    for (const auto& [name, table] : all) std::printf("%s\n", name.c_str());
    return 0;
  }
  for (const auto& [name, table] : all)
    if (name == words[1]) return levels::check(*table(), portable);
  std::printf("%s cannot run here\n", words[1]);
  return 2;
}
