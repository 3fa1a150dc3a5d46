// Faults for tests, preloaded with LD_PRELOAD; the program itself has no switch for faults. Environment variables:
// TRIAD_FAULTS="RANK SECONDS [FILE]": on this rank each matrix product (cblas_sgemm) first sleeps SECONDS; with FILE
// only while FILE exists. Creates FILE.asleep when a product sleeps. TRIAD_FAULTS_MOST_S=SECONDS limits the sum of the
// sleeps. TRIAD_BEND=WORD: in processes whose command line contains WORD, adds 1 to the first element of each product.
// With TRIAD_BEND_NAN=1 sets it to NaN instead, and only in products whose left factor is transposed: the weights'
// gradients. TRIAD_LOSE=FILE: deletes FILE when a process ends. TRIAD_EARLY_USR1=1: `triad` sends itself SIGUSR1 before
// main().
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

struct Plant {
  int rank = 0;
  double each_s = 0, most_s = std::numeric_limits<double>::infinity();
  char file[1000] = "";
  bool planted = false;
  std::mutex mutex;  // threads sleep one after another, so that the total does not depend on their number

  Plant() {
    const char* text = std::getenv("TRIAD_FAULTS");
    const char* own = std::getenv("OMPI_COMM_WORLD_RANK");
    planted = text != nullptr && std::sscanf(text, "%d %lf %999s", &rank, &each_s, file) >= 2 &&
              rank == (own == nullptr ? 0 : std::atoi(own));
    if (const char* most = std::getenv("TRIAD_FAULTS_MOST_S")) most_s = std::atof(most);
  }
  bool may_sleep() const { return (file[0] == '\0' || access(file, F_OK) == 0); }
  // Sleeps until the time is over or the file is deleted; signals do not end the sleep.
  void sleep() {
    if (!planted || !may_sleep()) return;
    const std::lock_guard lock(mutex);
    constexpr double kSliceS = 0.1;
    double left = std::min(each_s, most_s);
    if (file[0] != '\0' && left > 0 && may_sleep()) std::ofstream(std::string(file) + ".asleep") << "asleep";
    most_s -= left;
    for (; left > 0 && may_sleep(); left -= kSliceS)
      std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, kSliceS)));
  }
};

struct Bend {
  bool bent = false, to_nan = false;

  Bend() {
    const char* word = std::getenv("TRIAD_BEND");
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    const std::string words{std::istreambuf_iterator<char>(file), {}};
    bent = word != nullptr && words.find(word) != std::string::npos;
    to_nan = std::getenv("TRIAD_BEND_NAN") != nullptr;
  }
  void apply(float& first, bool transposed) const {
    if (bent && !to_nan) first += 1;
    if (bent && to_nan && transposed) first = std::numeric_limits<float>::quiet_NaN();
  }
};

struct Loss {
  ~Loss() {
    if (const char* path = std::getenv("TRIAD_LOSE")) std::remove(path);
  }
} loss;

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
  static Plant plant;
  static const auto product = reinterpret_cast<Product>(dlsym(RTLD_NEXT, "cblas_sgemm"));
  plant.sleep();
  product(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  static const Bend bend;
  constexpr int kTransposed = 112;  // CblasTrans in cblas.h
  bend.apply(c[0], ta == kTransposed);
}
