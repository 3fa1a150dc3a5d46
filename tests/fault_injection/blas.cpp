// Loaded in front of the program (LD_PRELOAD): matrix products that fall asleep, as TRIAD_FAULTS says. The program
// itself has no switch for faults. "rank each_s [file]": on that rank each product sleeps each_s first, and where a
// file is named only while there is one; FILE.asleep is there once one sleeps. TRIAD_FAULTS_MOST_S: so long in all, and
// no longer. And products that are wrong: TRIAD_BEND is a word, and in programs whose
// command line has it the first element of each comes out greater by one; with TRIAD_BEND_NAN=1 it is a NaN instead,
// where the left factor is transposed: in gradients of weights alone. And a file that gets lost: TRIAD_LOSE is gone
// when a program ends. And a signal that comes before main: with TRIAD_EARLY_USR1 `triad` sends itself SIGUSR1.
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
  std::mutex mutex;  // threads sleep one after the other: what they sleep in all does not depend on their number

  Plant() {
    const char* text = std::getenv("TRIAD_FAULTS");
    const char* own = std::getenv("OMPI_COMM_WORLD_RANK");
    planted = text != nullptr && std::sscanf(text, "%d %lf %999s", &rank, &each_s, file) >= 2 &&
              rank == (own == nullptr ? 0 : std::atoi(own));
    if (const char* most = std::getenv("TRIAD_FAULTS_MOST_S")) most_s = std::atof(most);
  }
  bool may_sleep() const { return (file[0] == '\0' || access(file, F_OK) == 0); }
  // Until its time is over or the file gone, whatever signals come.
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
  constexpr int kTransposed = 112;  // of cblas.h
  bend.apply(c[0], ta == kTransposed);
}
