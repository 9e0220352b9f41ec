// Products for x86-64 with AVX-512: VNNI for int8, BF16 for bfloat16.

#ifndef SPECJAX_KERNELS_PRODUCTS_AVX512_H_
#define SPECJAX_KERNELS_PRODUCTS_AVX512_H_

#include <utility>

#include "products.h"

#if defined(HAS_X86_CODE)

#define TARGET "avx512f,avx512bw,avx512vnni,avx512bf16"
#define AVX512 __attribute__((target(TARGET)))
#define AVX512_INLINE \
  static inline __attribute__((always_inline, target(TARGET)))

namespace specjax {
namespace avx512 {

template <typename T>
struct Vectors;

template <>
struct Vectors<Int8> {
  using Inputs = __m512i;
  using Sums = __m512i;
  static constexpr int64_t kInputs = 64;  // Of one register.
};

template <>
struct Vectors<Bfloat16> {
  using Inputs = __m512bh;
  using Sums = __m512;
  static constexpr int64_t kInputs = 32;
};

template <typename T>
bool IsSupported();

template <>
inline bool IsSupported<Int8>() {
  static const bool is_supported = __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512vnni");
  return is_supported;
}

template <>
inline bool IsSupported<Bfloat16>() {
  static const bool is_supported = __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512bf16");
  return is_supported;
}

// VNNI wants one side unsigned: the weights are raised by 128, and each sum of
// a row begins with what that adds.
inline int32_t FirstSum(const int8_t* x, int64_t i) {
  int32_t sum = 0;
  for (int64_t k = 0; k < i; ++k) sum += x[k];
  return -128 * sum;
}

inline float FirstSum(const uint16_t*, int64_t) { return 0; }

AVX512_INLINE void Clear(__m512i& x) { x = _mm512_setzero_si512(); }
AVX512_INLINE void Clear(__m512& x) { x = _mm512_setzero_ps(); }

// The first n inputs, then zeros; those behind them are not touched.
AVX512_INLINE __m512i Load(const int8_t* x, int64_t n) {
  if (n >= 64) return _mm512_loadu_si512(x);
  return _mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, x);
}

AVX512_INLINE __m512bh Load(const uint16_t* x, int64_t n) {
  if (n >= 32) return (__m512bh)_mm512_loadu_si512(x);
  return (__m512bh)_mm512_maskz_loadu_epi16((uint32_t{1} << n) - 1, x);
}

AVX512_INLINE __m512i Raise(__m512i weights) {
  return _mm512_xor_si512(weights, _mm512_set1_epi8(-128));
}

AVX512_INLINE __m512bh Raise(__m512bh weights) { return weights; }

AVX512_INLINE void MultiplyAdd(__m512i x, __m512i weights, __m512i& sums) {
  sums = _mm512_dpbusd_epi32(sums, weights, x);
}

// Two products are added to each sum one after the other, each rounded; tiny
// numbers count as zero.
AVX512_INLINE void MultiplyAdd(__m512bh x, __m512bh weights, __m512& sums) {
  sums = _mm512_dpbf16_ps(sums, x, weights);
}

AVX512_INLINE __m512i Add(__m512i a, __m512i b) {
  return _mm512_add_epi32(a, b);
}

AVX512_INLINE __m512 Add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }

AVX512_INLINE int32_t Total(__m512i sums) {
  return _mm512_reduce_add_epi32(sums);
}

AVX512_INLINE float Total(__m512 sums) { return _mm512_reduce_add_ps(sums); }

// Adds the products of the first n inputs, at most a register of them. The
// loops vanish: with constant indices the sums stay in registers.
template <typename T, int R, int C>
AVX512_INLINE void AddStep(const typename T::Narrow* x,
                           const typename T::Narrow* weight, int64_t stride,
                           int64_t n,
                           typename Vectors<T>::Sums (&sums)[R][C]) {
  typename Vectors<T>::Inputs weights[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) weights[c] = Raise(Load(weight + c * stride, n));
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const typename Vectors<T>::Inputs row = Load(x + r * stride, n);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) MultiplyAdd(row, weights[c], sums[r][c]);
  }
}

// R rows from m times C channels from o.
template <typename T, int R, int C>
AVX512 void Tile(const Product<T>& p, int64_t m, int64_t o) {
  constexpr int64_t kInputs = Vectors<T>::kInputs;
  constexpr int64_t kAhead = 128 * kInputs;  // 8 KB.
  const int64_t n = p.i;
  const typename T::Narrow* x = p.x + m * p.i;
  const typename T::Narrow* weight = p.weight + o * p.i;
  // Two sums, of every other step: each waits for its last addition.
  typename Vectors<T>::Sums even[R][C], odd[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      Clear(even[r][c]);
      Clear(odd[r][c]);
    }
  }
  int64_t k = 0;
  for (; k + 2 * kInputs <= n; k += 2 * kInputs) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      // What is read soon, into the second cache: the first one keeps too few
      // misses under way. Behind a channel's end the next tile's channel is
      // read. Beyond the matrix this does nothing.
      const typename T::Narrow* soon = weight + c * p.i + k + kAhead;
      if (k + kAhead >= n) soon += (C - 1) * p.i;
      _mm_prefetch(soon, _MM_HINT_T1);
      _mm_prefetch(soon + kInputs, _MM_HINT_T1);
    }
    AddStep<T, R, C>(x + k, weight + k, p.i, kInputs, even);
    AddStep<T, R, C>(x + k + kInputs, weight + k + kInputs, p.i, kInputs, odd);
  }
  if (k + kInputs <= n) {
    AddStep<T, R, C>(x + k, weight + k, p.i, kInputs, even);
    k += kInputs;
  }
  if (k < n) AddStep<T, R, C>(x + k, weight + k, p.i, n - k, odd);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      typename T::Sum* y = p.y + (m + r) * p.o + o + c;
      const auto sum = Total(Add(even[r][c], odd[r][c]));
      *y = p.first[m + r] + sum;
    }
  }
}

template <typename T, int R, int C>
AVX512 void Group(const Product<T>& p, int64_t m, int64_t begin, int64_t end) {
  int64_t o = begin;
  for (; o + C <= end; o += C) Tile<T, R, C>(p, m, o);
  for (; o < end; ++o) Tile<T, R, 1>(p, m, o);
}

template <typename T, int C, int... R>
void RunGroups(const Product<T>& p, int64_t begin, int64_t end,
               std::integer_sequence<int, R...>) {
  using GroupOf = void (*)(const Product<T>&, int64_t, int64_t, int64_t);
  static constexpr GroupOf kGroups[] = {Group<T, R + 1, C>...};
  ForGroups(p.m, sizeof...(R), [&](int64_t m, int64_t rows) {
    kGroups[rows - 1](p, m, begin, end);
  });
}

// Memory is read in order, one channel after the other. Where the rows do not
// fit the first cache, two channels at once read each row half as often.
template <typename T>
void Run(const Product<T>& p, int64_t begin, int64_t end) {
  constexpr int64_t kFit = 24 << 10;
  const int64_t num_bytes = p.m * p.i * sizeof(typename T::Narrow);
  const bool is_single = p.m == 1 || num_bytes <= kFit;
  for (int64_t o = begin; o < end; o += kBlock) {
    const int64_t last = std::min(o + kBlock, end);
    if (is_single) {
      RunGroups<T, 1>(p, o, last, std::make_integer_sequence<int, 8>());
    } else {
      RunGroups<T, 2>(p, o, last, std::make_integer_sequence<int, 6>());
    }
  }
}

}  // namespace avx512
}  // namespace specjax

#undef TARGET
#undef AVX512
#undef AVX512_INLINE

#endif  // HAS_X86_CODE
#endif  // SPECJAX_KERNELS_PRODUCTS_AVX512_H_
