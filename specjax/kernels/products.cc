// Products of some rows with an [out, in] matrix on a CPU, in one pass over
// the matrix; products.py has the contract.
//
//   y[m, o] = sum_i x[m, i] * weight[o, i]
//
// The rows are widened once (int8 to int16, bfloat16 to float32), the weights
// as they go by. A tile is R rows times C channels of sums in registers:
//
//   for each piece of kPiece inputs        (its rows stay in the first cache)
//     for each group of R <= 6 rows
//       for each C channels of a block     (it stays in the second cache)
//         sums of 16 inputs at a time; added to y when the piece ends
//
// Every y[m, o] has one vector of sums of its own and goes through the inputs
// in the same order whatever R, C and the thread, so that a row has the same
// bits in a product of any number of rows.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2_CODE 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE \
  static inline __attribute__((always_inline, target("avx2,fma")))
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kStep = 16;   // Inputs per step; widened rows are padded.
constexpr int64_t kRows = 6;    // Rows per group: 6 x 2 sums and 16 registers.
constexpr int64_t kBlock = 32;  // Channels of a block, and of a task or more.
// Below this many bytes of weights another thread costs more than it does.
constexpr int64_t kSmall = 96 << 10;

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
  const typename T::Wide* x;  // [M, padded]
  const typename T::Narrow* weight;
  typename T::Sum* y;
  int64_t m, o, i, padded;
};

inline int64_t RoundUp(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}

inline float ToFloat(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Widens one row. A step of 16 bfloat16 has its even inputs first, then the
// odd ones: so they come out of the registers of a step of weights.
void Widen(const int8_t* x, int64_t i, int16_t* wide) {
  std::copy(x, x + i, wide);
}

void Widen(const uint16_t* x, int64_t i, float* wide) {
  int64_t k = 0;
  for (; k + kStep <= i; k += kStep) {
    for (int j = 0; j < 8; ++j) {
      wide[k + j] = ToFloat(x[k + 2 * j]);
      wide[k + 8 + j] = ToFloat(x[k + 2 * j + 1]);
    }
  }
  for (int64_t j = 0; k + j < i; ++j) {
    wide[k + j % 2 * 8 + j / 2] = ToFloat(x[k + j]);
  }
}

// Whether tiny numbers count as zero differs between the threads that may
// take a task; here they always do, where the processor can be told.
class FlushTiny {
 public:
#if defined(HAS_AVX2_CODE)
  FlushTiny() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushTiny() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__) && defined(__GNUC__)
  FlushTiny() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushTiny() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// ---- For any processor: one sum at a time, so the order is the same. ----

int32_t Dot(const int16_t* x, const int16_t* w, int64_t n) {
  int32_t sum = 0;
  for (int64_t k = 0; k < n; ++k) sum += int32_t{x[k]} * int32_t{w[k]};
  return sum;
}

float Dot(const float* x, const float* w, int64_t n) {
  float sums[kStep] = {};
  for (int64_t k = 0; k < n; k += kStep) {
    for (int j = 0; j < kStep; ++j) sums[j] += x[k + j] * w[k + j];
  }
  for (int half = kStep / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

template <typename T>
void RunPlain(const Product<T>& p, int64_t begin, int64_t end) {
  typename T::Wide wide[T::kPiece];
  for (int64_t start = 0; start < p.i; start += T::kPiece) {
    const int64_t n = std::min(T::kPiece, p.i - start);
    const int64_t padded = RoundUp(n, kStep);
    std::fill(wide, wide + padded, typename T::Wide{0});
    for (int64_t o = begin; o < end; ++o) {
      Widen(p.weight + o * p.i + start, n, wide);
      for (int64_t m = 0; m < p.m; ++m) {
        typename T::Sum* y = p.y + m * p.o + o;
        const auto sum = Dot(p.x + m * p.padded + start, wide, padded);
        *y = start == 0 ? sum : *y + sum;
      }
    }
  }
}

// ---- For x86-64 with AVX2 and FMA. ----

#if defined(HAS_AVX2_CODE)

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
  const typename T::Wide* x = p.x + m * p.padded + start;
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
AVX2 void RunAvx2(const Product<T>& p, int64_t begin, int64_t end) {
  using GroupOf = void (*)(const Product<T>&, int64_t, int64_t, int64_t,
                           int64_t, int64_t);
  static constexpr GroupOf kGroups[kRows] = {
      Group<T, 1>, Group<T, 2>, Group<T, 3>,
      Group<T, 4>, Group<T, 5>, Group<T, 6>};
  // Groups of about one size: 8 rows are 4 + 4.
  const int64_t num_groups = (p.m + kRows - 1) / kRows;
  for (int64_t o = begin; o < end; o += kBlock) {
    const int64_t last = std::min(o + kBlock, end);
    for (int64_t start = 0; start < p.i; start += T::kPiece) {
      const int64_t n = std::min(T::kPiece, p.i - start);
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t m = p.m * group / num_groups;
        const int64_t rows = p.m * (group + 1) / num_groups - m;
        kGroups[rows - 1](p, m, o, last, start, n);
      }
    }
  }
}

#endif  // HAS_AVX2_CODE

template <typename T>
void Run(const Product<T>& p, int64_t begin, int64_t end) {
  const FlushTiny flush;
#if defined(HAS_AVX2_CODE)
  static const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) return RunAvx2(p, begin, end);
#endif
  RunPlain(p, begin, end);
}

// Tasks 0..count, each taken once by whichever thread is free. The caller
// takes tasks too and waits only for those that others have begun, so a pool
// whose threads are all busy, or that has none, delays nothing.
template <typename F>
class Tasks {
 public:
  Tasks(int64_t count, const F& run) : run_(run), count_(count) {}

  void Work() {
    for (int64_t task; (task = next_.fetch_add(1)) < count_;) {
      run_(task);
      if (num_done_.fetch_add(1) + 1 == count_) {
        const std::lock_guard<std::mutex> lock(mutex_);
        all_done_.notify_one();
      }
    }
  }

  void Wait() {
    // The others are at their last tasks: look a while before going to sleep.
    for (int look = 0; look < 2000; ++look) {
      if (num_done_.load() == count_) return;
#if defined(HAS_AVX2_CODE)
      _mm_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return num_done_.load() == count_; });
  }

 private:
  const F run_;  // A copy: a thread may come when everything is over.
  const int64_t count_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> num_done_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
};

template <typename F>
void RunTasks(ffi::ThreadPool& pool, int64_t count, const F& run) {
  const int64_t num_others = std::min(pool.num_threads(), count) - 1;
  const auto tasks = std::make_shared<Tasks<F>>(count, run);
  for (int64_t k = 0; k < num_others; ++k) {
    pool.Schedule([tasks] { tasks->Work(); });
  }
  tasks->Work();
  tasks->Wait();
}

template <typename T>
ffi::Error Multiply(ffi::ThreadPool& pool, const typename T::Narrow* x,
                    ffi::Span<const int64_t> x_dims,
                    const typename T::Narrow* weight,
                    ffi::Span<const int64_t> weight_dims,
                    typename T::Sum* y, ffi::Span<const int64_t> y_dims) {
  const int64_t m = x_dims[0], i = x_dims[1], o = weight_dims[0];
  if (weight_dims[1] != i || y_dims[0] != m || y_dims[1] != o) {
    return ffi::Error::InvalidArgument("x, weight and y do not match.");
  }
  if (m == 0 || o == 0) return ffi::Error::Success();
  if (i == 0) std::fill(y, y + m * o, typename T::Sum{0});
  // Kept by the thread, for the next product.
  thread_local std::vector<typename T::Wide> wide;
  const int64_t padded = RoundUp(i, kStep);
  wide.assign(m * padded, 0);
  for (int64_t row = 0; row < m; ++row) {
    Widen(x + row * i, i, wide.data() + row * padded);
  }
  const Product<T> product = {wide.data(), weight, y, m, o, i, padded};
  const int64_t num_bytes = o * i * sizeof(typename T::Narrow);
  if (num_bytes < kSmall) {
    Run(product, 0, o);
    return ffi::Error::Success();
  }
  // Eight tasks for each thread: the slowest is not waited for long.
  const int64_t num_tasks = 8 * std::max<int64_t>(pool.num_threads(), 1);
  const int64_t task_size = RoundUp((o + num_tasks - 1) / num_tasks, kBlock);
  RunTasks(pool, (o + task_size - 1) / task_size,
           [product, task_size](int64_t task) {
             const int64_t begin = task * task_size;
             Run(product, begin, std::min(begin + task_size, product.o));
           });
  return ffi::Error::Success();
}

ffi::Error Int8Product(ffi::ThreadPool pool, ffi::BufferR2<ffi::S8> x,
                       ffi::BufferR2<ffi::S8> weight,
                       ffi::ResultBufferR2<ffi::S32> y) {
  return Multiply<Int8>(pool, x.typed_data(), x.dimensions(),
                        weight.typed_data(), weight.dimensions(),
                        y->typed_data(), y->dimensions());
}

ffi::Error Bfloat16Product(ffi::ThreadPool pool, ffi::BufferR2<ffi::BF16> x,
                           ffi::BufferR2<ffi::BF16> weight,
                           ffi::ResultBufferR2<ffi::F32> y) {
  return Multiply<Bfloat16>(pool, x.typed_data(), x.dimensions(),
                            weight.typed_data(), weight.dimensions(),
                            y->typed_data(), y->dimensions());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_int8_product, Int8Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::S8>>()
                                  .Arg<ffi::BufferR2<ffi::S8>>()
                                  .Ret<ffi::BufferR2<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_bfloat16_product, Bfloat16Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());

// The jaxlib whose headers this was compiled with.
extern "C" const char* specjax_jaxlib_version() { return JAXLIB_VERSION; }
