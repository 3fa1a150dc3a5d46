#include "engine/process/start_times.h"

#include <fmt/format.h>
#include <unistd.h>

#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>

namespace triad {

namespace {

// Seconds since this process started, in the kernel's clock ticks (usually 1/100 s); 0 if the kernel does not say.
double process_age() {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');  // the name, field 2, may contain blanks and parentheses
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  constexpr int kBetween = 22 - 3;  // the start time is field 22, and field 3 is the next one
  std::string skipped;
  for (int i = 0; i < kBetween; ++i) fields >> skipped;
  double start_ticks = 0;
  timespec now{};
  if (!(fields >> start_ticks) || start_ticks <= 0 || clock_gettime(CLOCK_BOOTTIME, &now) != 0) return 0;
  const double age = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec) -
                     start_ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
  return age > 0 ? age : 0;
}

}  // namespace

StartTimes::StartTimes() : last_(std::chrono::steady_clock::now()) { phases_.push_back({"program", process_age()}); }

void StartTimes::ends(const std::string& phase) {
  const auto now = std::chrono::steady_clock::now();
  phases_.push_back({phase, std::chrono::duration<double>(now - std::exchange(last_, now)).count()});
}

double StartTimes::seconds() const {
  double sum = 0;
  for (const Phase& p : phases_) sum += p.seconds;
  return sum;
}

std::string StartTimes::text(size_t first) const {
  constexpr double kShown = 0.005;
  std::string parts;
  for (size_t i = first; i < phases_.size(); ++i)
    if (phases_[i].seconds >= kShown)
      parts += fmt::format("{}{} {:.2f}", parts.empty() ? ": " : ", ", phases_[i].name, phases_[i].seconds);
  return fmt::format("{:.2f} s{}", seconds(), parts);
}

}  // namespace triad
