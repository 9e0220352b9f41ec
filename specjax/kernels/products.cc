// Products of some rows with an [out, in] matrix on a CPU, in one pass over
// the matrix; products.py has the contract.
//
//   y[m, o] = sum_i x[m, i] * weight[o, i]
//
// A tile is R rows times C channels of sums in registers:
//
//   for each block of channels             (a piece stays in the second cache)
//     for each piece of inputs             (with AVX-512 all of them)
//       for each group of R rows
//         for each C channels
//           sums of one register of inputs at a time; added to y when the
//           piece ends
//
// Every y[m, o] has one vector of sums of its own and goes through the inputs
// in the same order whatever R, C and the thread, so that a row has the same
// bits in a product of any number of rows. Another processor may have another
// order.
//
//   products.h          what all of them share
//   products_avx512.h   where the processor multiplies narrow types itself
//   products_avx2.h     narrow types widened first (int8 to int16, bfloat16 to
//                       float32): the rows once, the weights as they go by
//   here                any processor, slowly; threads; what XLA calls

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "products.h"
#include "products_avx2.h"
#include "products_avx512.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace specjax {
namespace {

// Below this many bytes of weights another thread costs more than it does.
constexpr int64_t kSmall = 96 << 10;

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
#if defined(HAS_X86_CODE)
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
        const auto sum = Dot(p.wide + m * p.padded + start, wide, padded);
        *y = start == 0 ? sum : *y + sum;
      }
    }
  }
}

enum Code { kPlain, kAvx2, kAvx512 };

// The tests turn it down, to see the other code as well.
std::atomic<int> most_code{kAvx512};

template <typename T>
Code ChooseCode() {
#if defined(HAS_X86_CODE)
  if (most_code >= kAvx512 && avx512::IsSupported<T>()) return kAvx512;
  if (most_code >= kAvx2 && avx2::IsSupported()) return kAvx2;
#endif
  return kPlain;
}

template <typename T>
void Run(const Product<T>& p, Code code, int64_t begin, int64_t end) {
  const FlushTiny flush;
#if defined(HAS_X86_CODE)
  if (code == kAvx512) return avx512::Run(p, begin, end);
  if (code == kAvx2) return avx2::Run(p, begin, end);
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
#if defined(HAS_X86_CODE)
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

// What a product needs beside its arguments.
template <typename T>
struct Prepared {
  std::vector<typename T::Wide> wide;
  std::vector<typename T::Sum> first;
};

template <typename T>
Product<T> Prepare(const typename T::Narrow* x,
                   const typename T::Narrow* weight, typename T::Sum* y,
                   int64_t m, int64_t o, int64_t i, Code code,
                   Prepared<T>& prepared) {
  const int64_t padded = RoundUp(i, kStep);
  Product<T> product = {x, nullptr, nullptr, weight, y, m, o, i, padded};
#if defined(HAS_X86_CODE)
  if (code == kAvx512) {
    prepared.first.resize(m);
    for (int64_t row = 0; row < m; ++row) {
      prepared.first[row] = avx512::FirstSum(x + row * i, i);
    }
    product.first = prepared.first.data();
    return product;
  }
#endif
  prepared.wide.assign(m * padded, 0);
  for (int64_t row = 0; row < m; ++row) {
    Widen(x + row * i, i, prepared.wide.data() + row * padded);
  }
  product.wide = prepared.wide.data();
  return product;
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
  if (i == 0) {
    std::fill(y, y + m * o, typename T::Sum{0});
    return ffi::Error::Success();
  }
  // Kept by the thread, for the next product.
  thread_local Prepared<T> prepared;
  const Code code = ChooseCode<T>();
  const Product<T> product = Prepare(x, weight, y, m, o, i, code, prepared);
  const int64_t num_bytes = o * i * sizeof(typename T::Narrow);
  if (num_bytes < kSmall) {
    Run(product, code, 0, o);
    return ffi::Error::Success();
  }
  // Eight tasks for each thread: the slowest is not waited for long.
  const int64_t num_tasks = 8 * std::max<int64_t>(pool.num_threads(), 1);
  const int64_t task_size = RoundUp((o + num_tasks - 1) / num_tasks, kBlock);
  RunTasks(pool, (o + task_size - 1) / task_size,
           [product, code, task_size](int64_t task) {
             const int64_t begin = task * task_size;
             Run(product, code, begin, std::min(begin + task_size, product.o));
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
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_int8_product, specjax::Int8Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::S8>>()
                                  .Arg<ffi::BufferR2<ffi::S8>>()
                                  .Ret<ffi::BufferR2<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_bfloat16_product,
                              specjax::Bfloat16Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());

// The jaxlib whose headers this was compiled with.
extern "C" const char* specjax_jaxlib_version() { return JAXLIB_VERSION; }

// Code made for fewer processors: 0 for any, 1 for AVX2, 2 for AVX-512.
extern "C" void specjax_set_most_code(int code) { specjax::most_code = code; }
