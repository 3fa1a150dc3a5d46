// StepQueue: the steps that are queued on the device and whose results are not read yet, and the run's counters.
#pragma once
#include <chrono>
#include <deque>
#include <functional>
#include <vector>

#include "train/run/run_setup.h"

namespace triad {

// A step whose result the host has read.
struct SettledStep {
  int64_t number = 0;            // 1-based
  double step_ms = 0;            // time since the previous step's result, without the time passed to exclude(), ms
  std::vector<double> fetch_ms;  // how long each micro-step waited for its tokens, ms
  RowDocuments documents;        // sums over this rank's rows
  int64_t cursor = 0;            // RunState::cursor after the step
  TrainStep::Result result;
};

class StepQueue {
 public:
  explicit StepQueue(RunSetup& setup) : setup_(setup), state_(setup.initial_state) {}

  struct Options {
    bool trace = false, measure = false;  // arguments for TrainStep::begin and TrainStep::update
    std::function<bool()> stop;           // called before the update: whether this rank requests an orderly stop
  };
  // Queues the next step on the device, with its stage's batches. state() counts the step from then on; settle()
  // returns its result. Throws MissingGradients.
  void push(Loader&, const Options&);
  // Waits for the oldest queued step and returns its result.
  SettledStep settle();

  // The loss of an evaluation after the steps so far.
  void evaluated(double loss) { state_.validation.add(setup_.config.train, state_.step, loss); }

  const RunState& state() const { return state_; }
  int64_t queued() const { return queued_; }  // steps whose results settle() has not returned yet
  int64_t next() const { return state_.step + 1; }

  using Clock = std::chrono::steady_clock;
  // Starts the clock for step times.
  void start_clock() { settled_at_ = Clock::now(); }
  // Subtracts time spent between steps from the next step time.
  void exclude(Clock::duration time) { settled_at_ += time; }

 private:
  RunSetup& setup_;
  RunState state_;
  int64_t queued_ = 0;
  std::deque<std::vector<double>> fetch_ms_;  // queued steps' fetch_ms, oldest first
  std::deque<RowDocuments> documents_;        // queued steps' documents, oldest first
  std::deque<int64_t> cursors_;               // queued steps' cursors, oldest first
  Clock::time_point settled_at_;
};

}  // namespace triad
