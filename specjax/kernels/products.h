// What products.cc and the code for each kind of processor share.

#ifndef SPECJAX_KERNELS_PRODUCTS_H_
#define SPECJAX_KERNELS_PRODUCTS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86_CODE 1
#include <immintrin.h>
#endif

namespace specjax {

// Inputs per step of the narrower processors; widened rows are padded to it.
constexpr int64_t kStep = 16;
constexpr int64_t kBlock = 32;  // Channels of a block, and of a task or more.

struct Int8 {
  using Narrow = int8_t;
  using Wide = int16_t;
  using Sum = int32_t;
  static constexpr int64_t kPiece = 2048;
  static constexpr int kParts = 1;  // Vectors that a step of a row fills.
};

struct Bfloat16 {
  using Narrow = uint16_t;
  using Wide = float;
  using Sum = float;
  static constexpr int64_t kPiece = 1024;
  static constexpr int kParts = 2;
};

template <typename T>
struct Product {
  const typename T::Narrow* x;       // [m, i]
  const typename T::Wide* wide;      // [m, padded], x widened; not for AVX-512.
  const typename T::Sum* first;      // [m], added to each sum of AVX-512.
  const typename T::Narrow* weight;  // [o, i]
  typename T::Sum* y;                // [m, o]
  int64_t m, o, i, padded;
};

inline int64_t RoundUp(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}

// Calls group(m, rows) for all m rows in groups of at most `most`, of about one
// size: 9 rows are 5 + 4.
template <typename F>
inline __attribute__((always_inline)) void ForGroups(int64_t m, int64_t most,
                                                     const F& group) {
  const int64_t num_groups = (m + most - 1) / most;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t begin = m * g / num_groups;
    group(begin, m * (g + 1) / num_groups - begin);
  }
}

}  // namespace specjax

#endif  // SPECJAX_KERNELS_PRODUCTS_H_
