// From a token source to batches: which sequence comes when, and a thread that reads ahead of the step.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "io/data/dataset.h"

namespace triad {

// tokens and targets [micro_batch, seq_len], row-major. targets are the tokens one further on. Past `rows` there are no
// sequences (the end of a validation split): tokens there are 0, targets -1, which the loss leaves out.
struct Batch {
  std::vector<int32_t> tokens, targets;
  int64_t rows = 0;
};

// Sequences of T+1 tokens begin at multiples of T, so that every token but the first is a target once an epoch.
// Throws an Error with the numbers if the source holds not even one.
int64_t count_sequences(const TokenSource&, int64_t seq_len);

// The k-th sequence of a run (k = 0, 1, ...): in epoch k / n, at a position that a permutation keyed by (seed, epoch)
// gives.
int64_t sequence_position(int64_t k, int64_t n_sequences, uint64_t seed);

struct LoaderOptions {
  int64_t seq_len = 0;
  int64_t micro_batch = 0;  // sequences a rank and micro-step
  int64_t micro_steps = 1;  // a rank's batches an optimizer step
  uint64_t seed = 0;        // of the order
  int64_t rank = 0, world = 1;
  int64_t first_sequence = 0;  // a resume passes the cursor() it had
  int64_t prefetch = 4;        // batches read ahead
  double stall_s = 300;        // that next() waits at most
};

// An endless stream of training batches. A step is the next world * micro_steps * micro_batch sequences of the run's
// order; each rank takes a contiguous part of them, each micro-step a contiguous part of that. So seed and cursor alone
// decide which sequences a step holds, however many ranks share it, and there is no other state to save.
class Loader {
 public:
  Loader(std::shared_ptr<const TokenSource>, const LoaderOptions&);
  ~Loader();  // does not wait for a read, which may hang: what is told after it would never be
  Loader(const Loader&) = delete;

  // The rank's next batch. What the reading thread threw is thrown here, after the batches before it; an Error, too, if
  // it has not come after stall_s (a disk that hangs).
  Batch next();
  // Sequences that all ranks together have taken in the steps begun so far; exact between steps.
  int64_t cursor() const;

 private:
  // What both threads use; the reading one outlives the Loader until its read is over.
  struct Shared {
    std::shared_ptr<const TokenSource> source;
    LoaderOptions options;
    int64_t n_sequences = 0;

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Batch> ready;
    std::exception_ptr error;
    bool stop = false;

    void read_ahead();
    Batch read(int64_t index) const;
  };

  std::shared_ptr<Shared> shared_;
  int64_t taken_ = 0;  // batches that next() has returned
};

// A validation source's batches, in order: the same first ones every time. There are `count` of them, fewer where the
// source ends before; its last one may be partly filled (Batch::rows). Throws an Error with the numbers if there is not
// even one sequence.
int64_t count_validation_batches(const TokenSource&, int64_t seq_len, int64_t micro_batch, int64_t count);
Batch validation_batch(const TokenSource&, int64_t seq_len, int64_t micro_batch, int64_t index);

}  // namespace triad
