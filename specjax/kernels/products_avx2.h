// Products for x86-64 with AVX2 and FMA: narrow types are widened.

#ifndef SPECJAX_KERNELS_PRODUCTS_AVX2_H_
#define SPECJAX_KERNELS_PRODUCTS_AVX2_H_

#include "products.h"

#if defined(HAS_X86_CODE)

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE \
  static inline __attribute__((always_inline, target("avx2,fma")))

namespace specjax {
namespace avx2 {

constexpr int64_t kRows = 6;  // Per group: 6 x 2 sums and 16 registers.

inline bool IsSupported() {
  static const bool is_supported =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return is_supported;
}

template <typename T>
struct Vector;
template <>
struct Vector<Int8> {
  __m256i v;
};
template <>
struct Vector<Bfloat16> {
  __m256 v;
};

AVX2_INLINE void Clear(Vector<Int8>& x) { x.v = _mm256_setzero_si256(); }
AVX2_INLINE void Clear(Vector<Bfloat16>& x) { x.v = _mm256_setzero_ps(); }

// The weights of a step, widened; of bfloat16 the even ones or the odd ones.
AVX2_INLINE void LoadWeights(const int8_t* w, int, Vector<Int8>& to) {
  to.v = _mm256_cvtepi8_epi16(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
}

AVX2_INLINE void LoadWeights(const uint16_t* w, int odd,
                             Vector<Bfloat16>& to) {
  const __m256i both =
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  const __m256i odd_ones = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  to.v = _mm256_castsi256_ps(odd ? _mm256_and_si256(both, odd_ones)
                                 : _mm256_slli_epi32(both, 16));
}

// A step of a row. The empty statements keep it in a register: compilers read
// it from memory again for every channel, and reading is what limits a tile.
AVX2_INLINE void LoadRow(const int16_t* x, int, Vector<Int8>& to) {
  to.v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  asm("" : "+x"(to.v));
}

AVX2_INLINE void LoadRow(const float* x, int odd, Vector<Bfloat16>& to) {
  to.v = _mm256_loadu_ps(x + 8 * odd);
  asm("" : "+x"(to.v));
}

// `madd` adds up pairs of products: they fit easily, so the sums are exact.
AVX2_INLINE void MultiplyAdd(const Vector<Int8>& x, const Vector<Int8>& w,
                             Vector<Int8>& sums) {
  sums.v = _mm256_add_epi32(sums.v, _mm256_madd_epi16(x.v, w.v));
}

// Written out: given the choice, compilers take forms of it that overwrite
// `x`, and run out of registers.
AVX2_INLINE void MultiplyAdd(const Vector<Bfloat16>& x,
                             const Vector<Bfloat16>& w,
                             Vector<Bfloat16>& sums) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sums.v) : "x"(x.v), "x"(w.v));
}

AVX2_INLINE int32_t Total(const Vector<Int8>& sums) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(sums.v),
                            _mm256_extracti128_si256(sums.v, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1));
  return _mm_cvtsi128_si32(x);
}

AVX2_INLINE float Total(const Vector<Bfloat16>& sums) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(sums.v),
                        _mm256_extractf128_ps(sums.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  x = _mm_add_ss(x, _mm_shuffle_ps(x, x, 1));
  return _mm_cvtss_f32(x);
}

// Adds the products of one step of inputs. The loops vanish: with constant
// indices the sums stay in registers.
template <typename T, int R, int C>
AVX2_INLINE void AddStep(const typename T::Wide* x, int64_t x_stride,
                         const typename T::Narrow* weight,
                         int64_t weight_stride, Vector<T> (&sums)[R][C]) {
#pragma GCC unroll 2
  for (int part = 0; part < T::kParts; ++part) {
    Vector<T> weights[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const typename T::Narrow* w = weight + c * weight_stride;
      LoadWeights(w, part, weights[c]);
      // Those of the next tile: a row is over before the processor has seen
      // that it is read in order. Beyond the matrix this does nothing.
      if (part == 0) _mm_prefetch(w + C * weight_stride, _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Vector<T> row;
      LoadRow(x + r * x_stride, part, row);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) MultiplyAdd(row, weights[c], sums[r][c]);
    }
  }
}

// R rows from m times C channels from o, over the inputs start..start + n.
template <typename T, int R, int C>
AVX2 void Tile(const Product<T>& p, int64_t m, int64_t o, int64_t start,
               int64_t n) {
  Vector<T> sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) Clear(sums[r][c]);
  }
  const typename T::Wide* x = p.wide + m * p.padded + start;
  const typename T::Narrow* weight = p.weight + o * p.i + start;
  int64_t stride = p.i, whole = n / kStep * kStep;
  typename T::Narrow rest[C][kStep];
  // Once for the whole steps and once for the rest, by the same code: with a
  // copy of it for the rest, sums no longer stay in registers.
  for (;;) {
    for (int64_t k = 0; k < whole; k += kStep) {
      AddStep<T, R, C>(x + k, p.padded, weight + k, stride, sums);
    }
    const int64_t num_rest = n - whole;
    if (num_rest <= 0) break;
    // The weights end inside this step: what follows is not theirs.
    std::memset(rest, 0, sizeof rest);
    for (int c = 0; c < C; ++c) {
      std::copy_n(weight + c * stride + whole, num_rest, rest[c]);
    }
    x += whole;
    weight = rest[0];
    stride = kStep;
    n = whole = kStep;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      typename T::Sum* y = p.y + (m + r) * p.o + o + c;
      const auto sum = Total(sums[r][c]);
      *y = start == 0 ? sum : *y + sum;
    }
  }
}

template <typename T, int R>
AVX2 void Group(const Product<T>& p, int64_t m, int64_t begin, int64_t end,
                int64_t start, int64_t n) {
  constexpr int C = R > 2 ? 2 : 4;
  int64_t o = begin;
  for (; o + C <= end; o += C) Tile<T, R, C>(p, m, o, start, n);
  for (; o < end; ++o) Tile<T, R, 1>(p, m, o, start, n);
}

template <typename T>
AVX2 void Run(const Product<T>& p, int64_t begin, int64_t end) {
  using GroupOf = void (*)(const Product<T>&, int64_t, int64_t, int64_t,
                           int64_t, int64_t);
  static constexpr GroupOf kGroups[kRows] = {
      Group<T, 1>, Group<T, 2>, Group<T, 3>,
      Group<T, 4>, Group<T, 5>, Group<T, 6>};
  for (int64_t o = begin; o < end; o += kBlock) {
    const int64_t last = std::min(o + kBlock, end);
    for (int64_t start = 0; start < p.i; start += T::kPiece) {
      const int64_t n = std::min(T::kPiece, p.i - start);
      ForGroups(p.m, kRows, [&](int64_t m, int64_t rows) {
        kGroups[rows - 1](p, m, o, last, start, n);
      });
    }
  }
}

}  // namespace avx2
}  // namespace specjax

#undef AVX2
#undef AVX2_INLINE

#endif  // HAS_X86_CODE
#endif  // SPECJAX_KERNELS_PRODUCTS_AVX2_H_
