// Dense convolutions on weights in bfloat16: matrix products of pixels, their windows copied side by side.
//
// A float32 value is the sum of two in bfloat16 up to 2^-17 of it, a float16 one is such a sum, and of the four products of two such sums all but the
// least are taken: three times the arithmetic, which tiles have to spare. Of an infinity such a sum makes NaN.
#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "conv.h"
#include "kernels.h"
#include "vec.h"

namespace TW_ISA {

using tw::Activation;
using tw::CHANNELS;
using tw::ConvTask;

// Some pixels, counted over all images, by some blocks of features. PARTS of each value: 1 for bfloat16, else 2.
template <class T>
class Pairs {
 public:
  static constexpr int PARTS = std::is_same_v<T, uint16_t> ? 1 : 2;

  explicit Pairs(const ConvTask& t)
      : t(t), line(t.window_width * t.channels), depth(t.window_height * line), row(t.steps() * STEP_ROW) {}

  void run(int64_t begin, int64_t end, int64_t block_begin, int64_t block_end) const {
    const bool packed = PARTS == 1 && t.pointwise() && !t.scale && depth % STEP == 0;
    if (packed) return multiply((const char*)t.x + begin * row, begin, end, block_begin, block_end);
    const Bytes copy = allocate((end - begin) * row);
    pack(begin, end, (uint16_t*)copy.get());
    multiply((const char*)copy.get(), begin, end, block_begin, block_end);
  }

 private:
  static constexpr int64_t STEP = tw::PAIRED_DEPTH, STEP_ROW = PARTS * STEP * 2;  // inputs of a step; bytes of a row
  static constexpr int64_t TILE = STEP * CHANNELS * 2, STEP_BLOCK = PARTS * TILE;  // bytes of weights

  // Rows of `depth` inputs as bfloat16, a step's first parts before its second, and zeros up to whole steps.
  void pack(int64_t begin, int64_t end, uint16_t* to) const {
    const Bytes window = allocate(depth * sizeof(T));
    const int64_t pixels = t.out_height * t.out_width;
    for (int64_t pixel = begin; pixel < end; pixel++, to += row / 2) {
      const T* from = (const T*)t.x + pixel * t.channels;
      if (!t.pointwise()) gather(pixel, (T*)window.get()), from = (const T*)window.get();
      if (t.scale) pack_row(from, [scale = t.scale + pixel / pixels * t.channels](F x, int64_t k, int64_t count) {
          return x * load_some(scale + k, count);
        }, to);
      else pack_row(from, [](F x, int64_t, int64_t) { return x; }, to);
    }
  }

  template <class Scale>
  inline void pack_row(const T* from, const Scale& scaled, uint16_t* to) const {
    int64_t k = 0;
    for (; k + STEP <= depth; k += STEP)
      put_step(scaled(load_f32(from + k), k, LANES), scaled(load_f32(from + k + LANES), k + LANES, LANES), to + k * PARTS);
    if (k == depth) return;
    const int64_t rest = depth - k, low = std::min<int64_t>(rest, LANES), high = rest - low;
    put_step(scaled(load_first(from + k, low), k, low),
             high ? scaled(load_first(from + k + LANES, high), k + LANES, high) : F{}, to + k * PARTS);
  }

  static inline void put_step(F low, F high, uint16_t* to) {
    store_pair(to, low, high);
    if constexpr (PARTS == 2) store_pair(to + STEP, low - load_f32(to), high - load_f32(to + LANES));
  }

  // The window of an output, zeros where it leaves the image.
  void gather(int64_t pixel, T* to) const {
    const int64_t out_row = pixel / t.out_width, edge = pixel % t.out_width * t.stride_x - t.padding_x;
    const int64_t top = out_row % t.out_height * t.stride_y - t.padding_y;
    const T* image = (const T*)t.x + out_row / t.out_height * t.height * t.width * t.channels;
    const int64_t from = std::clamp<int64_t>(-edge, 0, t.window_width);
    const int64_t end = std::clamp<int64_t>(t.width - edge, from, t.window_width);
    for (int64_t y = 0; y < t.window_height; y++, to += line) {
      std::fill(to, to + line, T{});
      if (top + y < 0 || top + y >= t.height) continue;
      std::memcpy(to + from * t.channels, image + ((top + y) * t.width + edge + from) * t.channels,
                  (end - from) * t.channels * sizeof(T));
    }
  }

  const char* weights(int64_t block) const { return (const char*)t.weight + block * t.steps() * STEP_BLOCK; }

#if defined(TW_AMX)
  static constexpr int64_t NEAR = 1 << 15;

  void multiply(const char* rows, int64_t begin, int64_t end, int64_t block_begin, int64_t block_end) const {
    const TilesInUse tiles;
    const RowBlocks cut(end - begin, 1);
    shape_tiles(cut.rows);
    const int64_t low = std::min<int64_t>(cut.rows, TILE_ROWS);
    const int64_t together = std::min<int64_t>(cut.few() ? 4 : 2, block_end - block_begin);
    const int64_t strips = (block_end - block_begin + together - 1) / together;
    // Outputs are written side by side where all weights stay in the first level of cache, else weights are read once.
    const bool by_rows = (block_end - block_begin) * t.steps() * STEP_BLOCK <= NEAR;
    for (int64_t n = 0; n < cut.count * strips; n++) {
      const int64_t i = by_rows ? n / strips : n % cut.count, strip = by_rows ? n % strips : n / cut.count;
      const int64_t first = std::min(block_begin + strip * together, block_end - together);
      alignas(64) float sums[2 * TILE_ROWS * 2 * CHANNELS];
      const char* at = rows + cut.start(i) * row;
      memory_is_read();
      if (cut.few()) few(at, first, together, sums);
      else many(at, at + low * row, first, together, sums);
      memory_is_read();
      finish(begin + cut.start(i), cut.rows, first, together, sums);
    }
  }

  // Two tiles of rows by one block or two.
  void many(const char* low, const char* high, int64_t block, int64_t blocks, float* sums) const {
    const char *left = weights(block), *right = weights(block + blocks - 1);
    clear_sums();
    for (int64_t s = 0; s < t.steps(); s++, low += STEP_ROW, high += STEP_ROW, left += STEP_BLOCK, right += STEP_BLOCK) {
      _tile_loadd(6, left, 64);
      _tile_loadd(7, right, 64);
      if constexpr (PARTS == 2) {
        _tile_loadd(4, low + 64, row);
        _tile_loadd(5, high + 64, row);
        four_products();
      }
      _tile_loadd(4, low, row);
      _tile_loadd(5, high, row);
      four_products();
      if constexpr (PARTS == 2) {
        _tile_loadd(6, left + TILE, 64);
        _tile_loadd(7, right + TILE, 64);
        four_products();
      }
    }
    const int64_t line = blocks * CHANNELS * 4;
    float* high_sums = sums + TILE_ROWS * blocks * CHANNELS;
    _tile_stored(0, sums, line);
    _tile_stored(2, high_sums, line);
    if (blocks == 1) return;
    _tile_stored(1, sums + CHANNELS, line);
    _tile_stored(3, high_sums + CHANNELS, line);
  }

  static inline void four_products() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  // One tile of rows by up to four blocks.
  void few(const char* rows, int64_t block, int64_t blocks, float* sums) const {
    const char* w[4];
    for (int64_t b = 0; b < 4; b++) w[b] = weights(block + std::min(b, blocks - 1));
    clear_sums();
    for (int64_t s = 0, at = 0; s < t.steps(); s++, rows += STEP_ROW, at += STEP_BLOCK) {
      _tile_loadd(4, rows, row);
      if constexpr (PARTS == 2) _tile_loadd(5, rows + 64, row);
#define TW_BLOCK(N, W)                              \
  if (N < blocks) {                                 \
    _tile_loadd(W, w[N] + at, 64);                  \
    if constexpr (PARTS == 2) {                     \
      _tile_dpbf16ps(N, 5, W);                      \
      _tile_dpbf16ps(N, 4, W);                      \
      _tile_loadd(W, w[N] + at + TILE, 64);         \
    }                                               \
    _tile_dpbf16ps(N, 4, W);                        \
  }
      TW_BLOCK(0, 6)
      TW_BLOCK(1, 7)
      TW_BLOCK(2, 6)
      TW_BLOCK(3, 7)
    }
    const int64_t line = blocks * CHANNELS * 4;
#define TW_STORE(N) \
  if (N < blocks) _tile_stored(N, sums + N * CHANNELS, line);
    TW_STORE(0)
    TW_STORE(1)
    TW_STORE(2)
    TW_STORE(3)
#undef TW_STORE
#undef TW_BLOCK
  }
#else
#if defined(__AVX512F__)
  static constexpr int ROWS = 6, BLOCKS = 4;
#else
  static constexpr int ROWS = 4, BLOCKS = 1;
#endif

  void multiply(const char* rows, int64_t begin, int64_t end, int64_t block_begin, int64_t block_end) const {
    const int64_t count = end - begin;
    for (int64_t block = block_begin, next; block < block_end; block = next) {
      next = std::min<int64_t>(block_end, block + BLOCKS);
      for (int64_t i = 0; i < count; i += ROWS)
        if (next - block < BLOCKS) some_rows<1>(rows, begin, count, i, block, next);
        else some_rows<BLOCKS>(rows, begin, count, i, block, next);
    }
  }

  // The last rows of several may overlap those before.
  template <int NB>
  void some_rows(const char* rows, int64_t begin, int64_t count, int64_t i, int64_t block, int64_t end) const {
    for (; block < end; block += NB)
      if (count >= ROWS) products<ROWS, NB>(rows, begin, std::min(i, count - ROWS), block);
      else for (int64_t r = 0; r < count; r++) products<1, NB>(rows, begin, r, block);
  }

  template <int MR, int NB>
  void products(const char* rows, int64_t begin, int64_t first, int64_t block) const {
    F sum[MR * NB];
    for (int i = 0; i < MR * NB; i++) sum[i] = F{};
    const char *from = rows + first * row, *w = weights(block);
    for (int64_t s = 0; s < t.steps(); s++, from += STEP_ROW, w += STEP_BLOCK) {
      if constexpr (PARTS == 2) add<MR, NB>(from + 64, w, sum);
      add<MR, NB>(from, w, sum);
      if constexpr (PARTS == 2) add<MR, NB>(from, w + TILE, sum);
    }
    alignas(64) float sums[MR * NB * CHANNELS];
    for (int i = 0; i < MR * NB; i++) store(sums + i * CHANNELS, sum[i]);
    finish(begin + first, MR, block, NB, sums);
  }

  template <int MR, int NB>
  inline void add(const char* from, const char* weight, F (&sum)[MR * NB]) const {
    const int64_t next = t.steps() * STEP_BLOCK;
    for (int64_t pair = 0; pair < STEP / 2; pair++, weight += 64) {
      U w[NB];
      for (int b = 0; b < NB; b++) w[b] = load<U>(weight + b * next);
      for (int r = 0; r < MR; r++) {
        const uint32_t two = read<uint32_t>(from + r * row + 4 * pair);
        for (int b = 0; b < NB; b++) sum[r * NB + b] = dot2(sum[r * NB + b], w[b], two);
      }
    }
  }
#endif

  // Sums of some rows, each `blocks` wide, as outputs.
  void finish(int64_t pixel, int64_t rows, int64_t block, int64_t blocks, const float* sums) const {
    with_activation(t.activation, [&](auto a) {
      for (int64_t b = 0; b < blocks; b += 2)
        finish_two<a()>(pixel, rows, block + b, block + std::min(b + 1, blocks - 1), sums + b * CHANNELS, blocks);
    });
  }

  // Two blocks, or one twice.
  template <Activation A>
  void finish_two(int64_t pixel, int64_t rows, int64_t first, int64_t second, const float* sums, int64_t blocks) const {
    const int64_t left = t.first_feature(first), right = t.first_feature(second), count = std::min(CHANNELS, t.features);
    const int64_t beside = (second - first) * CHANNELS;
    const F low_bias = load<F>(t.bias + left), high_bias = load<F>(t.bias + right);
    for (int64_t r = 0, at = pixel * t.features; r < rows; r++, at += t.features, sums += blocks * CHANNELS) {
      F low = activated<A>(load<F>(sums) + low_bias), high = activated<A>(load<F>(sums + beside) + high_bias);
      T* out = (T*)t.out + at;
      if (t.residual) {
        const T* more = (const T*)t.residual + at;
        low = low + load_some(more + left, count), high = high + load_some(more + right, count);
      }
      if (PARTS == 1 && right == left + CHANNELS) {
        store_pair((uint16_t*)out + left, low, high);
      } else {
        put(out + left, low, count);
        put(out + right, high, count);
      }
    }
  }

  const ConvTask& t;
  const int64_t line, depth, row;  // values of a window's row, of a window; bytes of a packed row
};

void convolve_pairs(const ConvTask& t, int64_t begin, int64_t end, int64_t block_begin, int64_t block_end) {
  with_type(t.type, [&](auto number) { Pairs<decltype(number)>(t).run(begin, end, block_begin, block_end); });
}

}  // namespace TW_ISA
