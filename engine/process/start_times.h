// StartTimes: how long the phases of a program's start take, counted from process start, so that loading libraries is
// included. A phase ends where the next one begins: no time is left out.
#pragma once
#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace triad {

class StartTimes {
 public:
  StartTimes();  // ends the first phase, "program"

  // Ends the current phase under this name.
  void ends(const std::string& phase);
  // Runs work() as a separate phase, with the time since the last one.
  template <class Work>
  auto during(const char* phase, Work&& work) {
    const End end{*this, phase};
    return work();
  }

  struct Phase {
    std::string name;
    double seconds;
  };
  const std::vector<Phase>& phases() const { return phases_; }
  double seconds() const;  // time from process start to the end of the last phase
  // "1.52 s: program 0.11, device 0.30"; from phase `first` on, phases that round to 0.00 are left out.
  std::string text(size_t first = 0) const;

 private:
  struct End {
    StartTimes& times;
    const char* phase;
    ~End() { times.ends(phase); }
  };
  std::chrono::steady_clock::time_point last_;
  std::vector<Phase> phases_;
};

}  // namespace triad
