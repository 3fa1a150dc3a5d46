// Faults that tests inject with LD_PRELOAD, since the program itself has no switch for faults. Environment variables:
//   TRIAD_FAULTS="RANK SECONDS [FILE]"  on this rank each matrix product (cblas_sgemm) first sleeps SECONDS; with FILE
//                                       only while FILE exists. The first sleep creates FILE.asleep.
//   TRIAD_FAULTS_MOST_S=SECONDS         limits the sum of the sleeps
//   TRIAD_WRONG=WORD                    in processes whose command line contains WORD, adds 1 to the first element of
//                                       each product
//   TRIAD_WRONG_NAN=1                   sets that element to NaN instead, and only in products whose left factor is
//                                       transposed: those that compute gradients of weights
//   TRIAD_BLAS_CONFIG=TEXT              openblas_get_config() returns TEXT
//   TRIAD_BLAS_CORE=NAME                openblas_get_corename() returns NAME while OPENBLAS_CORETYPE is not set or
//   empty TRIAD_DELETE=FILE                   deletes FILE when a process ends TRIAD_EARLY_USR1=1 `triad` sends itself
//   SIGUSR1 before main()
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <mutex>
#include <string>
#include <thread>

namespace {

struct Sleeper {
  int rank = 0;
  double each_s = 0, most_s = std::numeric_limits<double>::infinity();
  char file[1000] = "";
  bool enabled = false;
  // Held during a sleep: threads sleep one after another, so their number doesn't change the total sleep.
  std::mutex mutex;

  Sleeper() {
    const char* text = std::getenv("TRIAD_FAULTS");
    const char* own = std::getenv("OMPI_COMM_WORLD_RANK");
    enabled = text != nullptr && std::sscanf(text, "%d %lf %999s", &rank, &each_s, file) >= 2 &&
              rank == (own == nullptr ? 0 : std::atoi(own));
    if (const char* most = std::getenv("TRIAD_FAULTS_MOST_S")) most_s = std::atof(most);
  }
  bool may_sleep() const { return (file[0] == '\0' || access(file, F_OK) == 0); }
  // Sleeps for each_s seconds, or until FILE is deleted. Signals do not end the sleep.
  void sleep() {
    if (!enabled || !may_sleep()) return;
    const std::lock_guard lock(mutex);
    constexpr double kSliceS = 0.1;
    double left = std::min(each_s, most_s);
    if (file[0] != '\0' && left > 0 && may_sleep()) std::ofstream(std::string(file) + ".asleep") << "asleep";
    most_s -= left;
    for (; left > 0 && may_sleep(); left -= kSliceS)
      std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, kSliceS)));
  }
};

struct WrongProducts {
  bool enabled = false, to_nan = false;

  WrongProducts() {
    const char* word = std::getenv("TRIAD_WRONG");
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    const std::string words{std::istreambuf_iterator<char>(file), {}};
    enabled = word != nullptr && words.find(word) != std::string::npos;
    to_nan = std::getenv("TRIAD_WRONG_NAN") != nullptr;
  }
  void apply(float& first, bool transposed) const {
    if (enabled && !to_nan) first += 1;
    if (enabled && to_nan && transposed) first = std::numeric_limits<float>::quiet_NaN();
  }
};

struct DeleteAtExit {
  ~DeleteAtExit() {
    if (const char* path = std::getenv("TRIAD_DELETE")) std::remove(path);
  }
} delete_at_exit;

struct EarlySignal {
  EarlySignal() {
    if (std::getenv("TRIAD_EARLY_USR1") != nullptr && std::string(program_invocation_short_name) == "triad")
      std::raise(SIGUSR1);
  }
} early_signal;

}  // namespace

extern "C" void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float* a, int lda,
                            const float* b, int ldb, float beta, float* c, int ldc) {
  using Product = decltype(&cblas_sgemm);
  static Sleeper sleeper;
  static const auto product = reinterpret_cast<Product>(dlsym(RTLD_NEXT, "cblas_sgemm"));
  sleeper.sleep();
  product(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  static const WrongProducts wrong_products;
  constexpr int kTransposed = 112;  // CblasTrans in cblas.h
  wrong_products.apply(c[0], ta == kTransposed);
}

extern "C" char* openblas_get_config() {
  if (char* const text = std::getenv("TRIAD_BLAS_CONFIG")) return text;
  return reinterpret_cast<char* (*)()>(dlsym(RTLD_NEXT, "openblas_get_config"))();
}

extern "C" char* openblas_get_corename() {
  char* const name = std::getenv("TRIAD_BLAS_CORE");
  const char* const chosen = std::getenv("OPENBLAS_CORETYPE");
  if (name != nullptr && (chosen == nullptr || *chosen == '\0')) return name;
  return reinterpret_cast<char* (*)()>(dlsym(RTLD_NEXT, "openblas_get_corename"))();
}
