// Sixteen numbers in four registers of Arm's.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace TW_ISA {

#define TW_FOUR  // registers for sixteen lanes

// GCC keeps a vector that is wider than the machine's in memory; of these four each has a register.
template <class T>
struct Four {
  typedef T Number;
  typedef T Quarter __attribute__((vector_size(16)));
  Quarter a, b, c, d;

  template <class S>
  explicit operator Four<S>() const {
    typedef typename Four<S>::Quarter Q;
    return {(Q)a, (Q)b, (Q)c, (Q)d};
  }
  T operator[](int i) const { return i < 4 ? a[i] : i < 8 ? b[i - 4] : i < 12 ? c[i - 8] : d[i - 12]; }
};

// What `use` makes of each quarter of `x`.
template <class R, class Use, class... V>
inline R by_quarters(const Use& use, V... x) {
  typedef typename R::Quarter Q;
  return {(Q)use(x.a...), (Q)use(x.b...), (Q)use(x.c...), (Q)use(x.d...)};
}

template <class T>
inline Four<T> spread(T x) {
  const typename Four<T>::Quarter all = {x, x, x, x};
  return {all, all, all, all};
}

#define TW_OPERATOR(op)                                                                                     \
  template <class T>                                                                                        \
  inline auto operator op(Four<T> x, Four<T> y) {                                                           \
    return Four<std::decay_t<decltype((x.a op y.a)[0])>>{x.a op y.a, x.b op y.b, x.c op y.c, x.d op y.d};   \
  }                                                                                                         \
  template <class T>                                                                                        \
  inline auto operator op(Four<T> x, typename Four<T>::Number y) {                                          \
    return x op spread<T>(y);                                                                               \
  }                                                                                                         \
  template <class T>                                                                                        \
  inline auto operator op(typename Four<T>::Number x, Four<T> y) {                                          \
    return spread<T>(x) op y;                                                                               \
  }
TW_OPERATOR(+)
TW_OPERATOR(-)
TW_OPERATOR(*)
TW_OPERATOR(/)
TW_OPERATOR(&)
TW_OPERATOR(|)
TW_OPERATOR(^)
TW_OPERATOR(<<)
TW_OPERATOR(>>)
TW_OPERATOR(<)
TW_OPERATOR(>)
TW_OPERATOR(<=)
TW_OPERATOR(>=)
TW_OPERATOR(!=)
#undef TW_OPERATOR

template <class T>
inline Four<T> operator-(Four<T> x) {
  return {-x.a, -x.b, -x.c, -x.d};
}

typedef Four<float> F;
typedef Four<int32_t> I;
typedef Four<uint32_t> U;

template <class V, class T>
inline V load(const T* p) {
  V v;
  std::memcpy(&v.a, p, 16);
  std::memcpy(&v.b, (const char*)p + 16, 16);
  std::memcpy(&v.c, (const char*)p + 32, 16);
  std::memcpy(&v.d, (const char*)p + 48, 16);
  return v;
}

template <class T, class N>
inline void store(T* p, Four<N> v) {
  std::memcpy(p, &v.a, 16);
  std::memcpy((char*)p + 16, &v.b, 16);
  std::memcpy((char*)p + 32, &v.c, 16);
  std::memcpy((char*)p + 48, &v.d, 16);
}

inline F splat(float x) { return spread(x); }
inline I splat(int32_t x) { return spread(x); }
inline F to_float(I x) {
  return by_quarters<F>([](auto q) { return vcvtq_f32_s32((int32x4_t)q); }, x);
}
inline I to_int(F x) {
  return by_quarters<I>([](auto q) { return vcvtq_s32_f32((float32x4_t)q); }, x);
}

// Lane by lane the one or the other; every bit of a lane of the mask is the same.
template <class T>
inline Four<T> select(I mask, Four<T> yes, Four<T> no) {
  const auto choose = [](auto m, auto y, auto n) { return vbslq_u32((uint32x4_t)m, (uint32x4_t)y, (uint32x4_t)n); };
  return by_quarters<Four<T>>(choose, mask, yes, no);
}

}  // namespace TW_ISA
