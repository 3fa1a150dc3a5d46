// Makes batches from a token source: the order of the sequences, and a thread that reads ahead of the training step.
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

// tokens and targets [micro_batch, seq_len], row-major. Rows from `rows` on hold no sequence (the end of a validation
// split): their tokens are 0 and their targets -1, which the loss ignores.
struct Batch {
  std::vector<int32_t> tokens, targets;
  int64_t rows = 0;
};

// The number of sequences of T+1 tokens, which begin at multiples of T, so that every token but the first is a target
// once an epoch. Throws an Error with the numbers if there is none.
int64_t count_sequences(const TokenSource&, int64_t seq_len);

// The position, in sequences, of a run's k-th training sequence (k = 0, 1, ...): in epoch k / n_sequences, chosen by a
// permutation keyed by (seed, epoch).
int64_t sequence_position(int64_t k, int64_t n_sequences, uint64_t seed);

struct LoaderOptions {
  int64_t seq_len = 0;
  int64_t micro_batch = 0;  // sequences per rank and micro-step
  int64_t micro_steps = 1;  // micro-steps per rank and optimizer step
  uint64_t seed = 0;        // of the shuffle
  int64_t rank = 0, world = 1;
  int64_t first_sequence = 0;  // a resumed run passes its saved cursor()
  int64_t prefetch = 4;        // batches read ahead
  double stall_s = 300;        // limit on the wait in next(), seconds
};

// An endless stream of training batches. A step consumes the next world * micro_steps * micro_batch sequences of the
// run's order; each rank reads a contiguous part of them, each micro-step a contiguous part of the rank's. So seed and
// cursor determine a step's sequences for any number of ranks, and there is no other state to save.
class Loader {
 public:
  Loader(std::shared_ptr<const TokenSource>, const LoaderOptions&);
  ~Loader();  // detaches from the reading thread, whose current read may hang
  Loader(const Loader&) = delete;

  // The rank's next batch. Rethrows an error of the reading thread after the batches that were read before it. Throws
  // if no batch arrives within stall_s (a disk that hangs).
  Batch next();
  // Sequences that all ranks consumed in the steps begun so far; exact between steps.
  int64_t cursor() const;

 private:
  // State of both threads; the reading thread keeps it alive until its last read ends.
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
  int64_t taken_ = 0;  // batches that next() returned
};

// The batches of a validation source, in order: the first ones are the same each time. Returns `count`, or fewer if the
// source ends earlier; the last batch may be partly filled (Batch::rows). Throws an Error with the numbers if there is
// not one sequence.
int64_t count_validation_batches(const TokenSource&, int64_t seq_len, int64_t micro_batch, int64_t count);
Batch validation_batch(const TokenSource&, int64_t seq_len, int64_t micro_batch, int64_t index);

}  // namespace triad
