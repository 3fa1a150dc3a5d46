#include "io/loader.h"

#include <algorithm>
#include <utility>

#include "engine/check.h"

namespace triad {

namespace {

constexpr uint64_t kOrderStream = 0x6f72646572000000;  // + epoch: apart from the other uses of a seed

// Fills row `row` of a batch with the sequence at a position.
void read_row(Batch& batch, int64_t row, const TokenSource& source, int64_t position, int64_t seq_len,
              std::vector<int32_t>& sequence) {
  sequence.resize(static_cast<size_t>(seq_len + 1));
  source.read(position * seq_len, sequence);
  std::copy(sequence.begin(), sequence.end() - 1, batch.tokens.begin() + row * seq_len);
  std::copy(sequence.begin() + 1, sequence.end(), batch.targets.begin() + row * seq_len);
}

Batch empty_batch(int64_t rows, int64_t seq_len) {
  const auto n = static_cast<size_t>(rows * seq_len);
  return {.tokens = std::vector<int32_t>(n, 0), .targets = std::vector<int32_t>(n, -1), .rows = 0};
}

}  // namespace

int64_t count_sequences(const TokenSource& source, int64_t seq_len) {
  TRIAD_CHECK(seq_len >= 1, "a sequence of {} tokens was asked for", seq_len);
  const int64_t n = (source.size() - 1) / seq_len;
  TRIAD_CHECK(source.size() > seq_len, "{} has {} tokens; one sequence of train.seq_len = {} needs {}", source.name(),
              source.size(), seq_len, seq_len + 1);
  return n;
}

int64_t sequence_position(int64_t k, int64_t n_sequences, uint64_t seed) {
  const auto epoch = static_cast<uint64_t>(k / n_sequences);
  return Permutation(n_sequences, seed, kOrderStream + epoch)(k % n_sequences);
}

Loader::Loader(std::shared_ptr<const TokenSource> source, const LoaderOptions& options)
    : source_(std::move(source)), options_(options), n_sequences_(count_sequences(*source_, options.seq_len)) {
  const LoaderOptions& o = options_;
  TRIAD_CHECK(o.micro_batch >= 1 && o.micro_steps >= 1 && o.prefetch >= 1 && o.first_sequence >= 0 && o.rank >= 0 &&
                  o.rank < o.world,
              "loader: micro_batch {}, micro_steps {}, rank {} of {}, first_sequence {}, prefetch {}", o.micro_batch,
              o.micro_steps, o.rank, o.world, o.first_sequence, o.prefetch);
  thread_ = std::thread([this] { read_ahead(); });
}

Loader::~Loader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Batch Loader::read(int64_t index) const {
  const LoaderOptions& o = options_;
  const int64_t step = index / o.micro_steps, micro_step = index % o.micro_steps;
  const int64_t first = o.first_sequence + ((step * o.world + o.rank) * o.micro_steps + micro_step) * o.micro_batch;
  Batch batch = empty_batch(o.micro_batch, o.seq_len);
  batch.rows = o.micro_batch;
  std::vector<int32_t> sequence;
  for (int64_t row = 0; row < o.micro_batch; ++row)
    read_row(batch, row, *source_, sequence_position(first + row, n_sequences_, o.seed), o.seq_len, sequence);
  return batch;
}

void Loader::read_ahead() {
  try {
    for (int64_t index = 0;; ++index) {
      Batch batch = read(index);
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || static_cast<int64_t>(ready_.size()) < options_.prefetch; });
      if (stop_) return;
      ready_.push_back(std::move(batch));
      lock.unlock();
      changed_.notify_all();
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    changed_.notify_all();
  }
}

Batch Loader::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !ready_.empty() || error_; });
  if (ready_.empty()) std::rethrow_exception(error_);
  Batch batch = std::move(ready_.front());
  ready_.pop_front();
  ++taken_;
  lock.unlock();
  changed_.notify_all();
  return batch;
}

int64_t Loader::cursor() const {
  const LoaderOptions& o = options_;
  const int64_t steps = (taken_ + o.micro_steps - 1) / o.micro_steps;
  return o.first_sequence + steps * o.world * o.micro_steps * o.micro_batch;
}

int64_t count_validation_batches(const TokenSource& source, int64_t seq_len, int64_t micro_batch, int64_t count) {
  return std::min(count, (count_sequences(source, seq_len) - 1) / micro_batch + 1);
}

Batch validation_batch(const TokenSource& source, int64_t seq_len, int64_t micro_batch, int64_t index) {
  const int64_t first = index * micro_batch;
  Batch batch = empty_batch(micro_batch, seq_len);
  batch.rows = std::min(micro_batch, count_sequences(source, seq_len) - first);
  std::vector<int32_t> sequence;
  for (int64_t row = 0; row < batch.rows; ++row) read_row(batch, row, source, first + row, seq_len, sequence);
  return batch;
}

}  // namespace triad
