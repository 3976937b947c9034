// Sixteen numbers side by side: one register, two, or what the compiler makes of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(TW_NEON)
#include "lanes_arm.h"
#endif

namespace TW_ISA {

constexpr int LANES = 16;

#if defined(__AVX2__) && !defined(__AVX512F__)
#define TW_TWO  // registers for sixteen lanes

// GCC keeps a vector that is wider than the machine's in memory, whatever is done with it: 3.5 to 50 times slower.
template <class T>
struct Two {
  typedef T Number;
  typedef T Half __attribute__((vector_size(8 * sizeof(T))));
  Half low, high;

  template <class S>
  explicit operator Two<S>() const {
    return {(typename Two<S>::Half)low, (typename Two<S>::Half)high};
  }
  T operator[](int i) const { return i < 8 ? low[i] : high[i - 8]; }
};

#define TW_OPERATOR(op)                                                                                      \
  template <class T>                                                                                         \
  inline auto operator op(Two<T> a, Two<T> b) {                                                              \
    return Two<std::decay_t<decltype((a.low op b.low)[0])>>{a.low op b.low, a.high op b.high};               \
  }                                                                                                          \
  template <class T>                                                                                         \
  inline auto operator op(Two<T> a, typename Two<T>::Number b) {                                             \
    return a op Two<T>{typename Two<T>::Half{} + b, typename Two<T>::Half{} + b};                            \
  }                                                                                                          \
  template <class T>                                                                                         \
  inline auto operator op(typename Two<T>::Number a, Two<T> b) {                                             \
    return Two<T>{typename Two<T>::Half{} + a, typename Two<T>::Half{} + a} op b;                            \
  }
TW_OPERATOR(+)
TW_OPERATOR(-)
TW_OPERATOR(*)
TW_OPERATOR(/)
TW_OPERATOR(&)
TW_OPERATOR(|)
TW_OPERATOR(<<)
TW_OPERATOR(>>)
TW_OPERATOR(<)
TW_OPERATOR(>)
TW_OPERATOR(<=)
TW_OPERATOR(>=)
TW_OPERATOR(!=)
#undef TW_OPERATOR

template <class T>
inline Two<T> operator-(Two<T> a) {
  return {-a.low, -a.high};
}

typedef Two<float> F;
typedef Two<int32_t> I;
typedef Two<uint32_t> U;

template <class V, class T>
inline V load(const T* p) {
  V v;
  std::memcpy(&v.low, p, 32);
  std::memcpy(&v.high, (const char*)p + 32, 32);
  return v;
}

template <class T, class N>
inline void store(T* p, Two<N> v) {
  std::memcpy(p, &v.low, 32);
  std::memcpy((char*)p + 32, &v.high, 32);
}

inline F splat(float x) { return {(F::Half)_mm256_set1_ps(x), (F::Half)_mm256_set1_ps(x)}; }
inline I splat(int32_t x) { return {(I::Half)_mm256_set1_epi32(x), (I::Half)_mm256_set1_epi32(x)}; }
inline F to_float(I x) {
  return {__builtin_convertvector(x.low, F::Half), __builtin_convertvector(x.high, F::Half)};
}
inline I to_int(F x) {
  return {__builtin_convertvector(x.low, I::Half), __builtin_convertvector(x.high, I::Half)};
}

// Lane by lane the one or the other.
template <class T>
inline Two<T> select(I mask, Two<T> yes, Two<T> no) {
  return {mask.low ? yes.low : no.low, mask.high ? yes.high : no.high};
}

#elif !defined(TW_FOUR)

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));

template <class V, class T>
inline V load(const T* p) {
  static_assert(sizeof(V) == 64);
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T>
inline void store(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// Not `F{} + x`, an addition that the compiler may not leave out (-0 + 0 is 0).
inline F splat(float x) { return F{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline I splat(int32_t x) { return I{} + x; }
inline F to_float(I x) { return __builtin_convertvector(x, F); }
inline I to_int(F x) { return __builtin_convertvector(x, I); }

// Lane by lane the one or the other.
template <class V>
inline V select(I mask, V yes, V no) {
  return mask ? yes : no;
}

#endif

inline F as_float(U x) { return (F)x; }
inline U as_bits(F x) { return (U)x; }

}  // namespace TW_ISA
