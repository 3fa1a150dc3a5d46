// Makes batches from a token source: sequence order, and a thread that reads ahead of the training step.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "io/data/mixture.h"
#include "io/data/rows.h"

namespace triad {

// A micro-batch: tokens and targets [micro_batch, seq_len], row-major. Rows from number `rows` on hold no sequence,
// which happens at a validation split's end: their tokens are 0 and their targets -1, which the loss ignores.
struct Batch {
  std::vector<int32_t> tokens, targets;
  // With LoaderOptions::within: the document bounds in the packed tokens, from 0 to their number, ascending; every
  // multiple of seq_len is a bound. A row without a sequence is one document. Otherwise empty.
  std::vector<int32_t> bounds;
  int64_t rows = 0;
  RowDocuments documents = {};  // training batch: sums over its rows
  int64_t step_targets = 0;     // training batch: targets other than -1 in its whole step, on all ranks
  // Training batch: each row's first padded token, seq_len if it has none; and the tokens without padding in its whole
  // step, on all ranks.
  std::vector<int32_t> padding_begin = {};
  int64_t step_tokens = 0;
  RowGroups groups = {};  // training batch: RowSource::groups_of its first row
};

struct LoaderOptions {
  int64_t seq_len = 0;
  int64_t micro_batch = 0;  // sequences per rank and micro-step
  int64_t micro_steps = 1;  // micro-steps per rank and optimizer step
  int64_t block = 0;        // RowOptions::block, like the next two
  Packing packing = Packing::stream;
  int64_t max_documents = 0;
  uint64_t seed = 0;    // shuffle seed
  bool within = false;  // attention stays within a document: batches have bounds
  int64_t rank = 0, world = 1;
  int64_t first_sequence = 0;  // where training begins, in sequences of seq_len tokens
  RowGroups known = {};        // RowOptions::known: groups at or before first_sequence
  int64_t prefetch = 4;        // batches to read ahead
  double stall_s = 300;        // longest time that next() waits for a batch, or for progress towards one, s
  // If set, next() calls it when it waits and the search for the first row has made progress.
  std::function<void()> advances = {};
};

// An endless stream of training batches. A step consumes the next world * micro_steps * micro_batch sequences in the
// run's order; each rank reads a contiguous part, each micro-step a contiguous part of the rank's. So seed and cursor
// determine a step's sequences for any rank count, and there is no other state to save.
class Loader {
 public:
  Loader(Mixture, const LoaderOptions&);
  ~Loader();  // does not wait for the reading thread, whose current read may hang
  Loader(const Loader&) = delete;

  // Returns this rank's next batch. The reading thread's error is rethrown after the batches that were read before it.
  // Throws if for stall_s no batch arrives and no row group is packed (for example if a disk hangs).
  Batch next();
  // How many sequences all ranks consumed in the steps begun so far; exact between steps.
  int64_t cursor() const;

 private:
  // The state that the reading thread and the caller share; the reading thread keeps it alive until its last read ends.
  struct Shared {
    Mixture data;
    LoaderOptions options;
    std::unique_ptr<RowSource> rows;  // used by the reading thread alone
    // The step that was counted last, its targets, and its tokens without padding.
    int64_t counted_step = -1, n_targets = 0, n_tokens = 0;

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Batch> ready;
    std::exception_ptr error;
    bool stop = false;

    void read_ahead();
    Batch read(int64_t index);
    void count(int64_t step);
  };

  std::shared_ptr<Shared> shared_;
  int64_t taken_ = 0;  // batches that next() has returned
};

// A validation split's batches, in order, each row as stream_rows has it; the first ones are the same in each
// evaluation. A mixture's rows are drawn as in training, each component's in order, so that the loss is that of its
// shares. count_validation_batches returns `count`, or fewer if a component ends earlier; the last batch may be partly
// filled (Batch::rows). Throws an Error with the numbers if a component has not one sequence.
int64_t count_validation_batches(const Mixture&, int64_t seq_len, int64_t micro_batch, int64_t count);
Batch validation_batch(const Mixture&, int64_t seq_len, int64_t micro_batch, int64_t index, bool within = false);

}  // namespace triad
