#include "io/data/loader.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "engine/check.h"
#include "engine/random_streams.h"

namespace triad {

namespace {

// Fills a row of a batch with the sequence at `position` (in sequences).
void read_row(Batch& batch, int64_t row, const TokenSource& source, int64_t position, int64_t seq_len) {
  const auto of_row = [&](std::vector<int32_t>& of_batch) {
    return std::span(of_batch).subspan(static_cast<size_t>(row * seq_len), static_cast<size_t>(seq_len));
  };
  source.read_sequence(position * seq_len, of_row(batch.tokens), of_row(batch.targets));
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
  return Permutation(n_sequences, seed, random_stream(RandomUse::order, epoch))(k % n_sequences);
}

Loader::Loader(std::shared_ptr<const TokenSource> source, const LoaderOptions& options)
    : shared_(std::make_shared<Shared>()) {
  const LoaderOptions& o = options;
  shared_->n_sequences = count_sequences(*source, o.seq_len);
  TRIAD_CHECK(o.micro_batch >= 1 && o.micro_steps >= 1 && o.prefetch >= 1 && o.first_sequence >= 0 && o.rank >= 0 &&
                  o.rank < o.world && o.stall_s > 0,
              "loader: micro_batch {}, micro_steps {}, rank {} of {}, first_sequence {}, prefetch {}, stall_s {}",
              o.micro_batch, o.micro_steps, o.rank, o.world, o.first_sequence, o.prefetch, o.stall_s);
  shared_->source = std::move(source);
  shared_->options = o;
  std::thread([shared = shared_] { shared->read_ahead(); }).detach();
}

Loader::~Loader() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->changed.notify_all();
}

Batch Loader::Shared::read(int64_t index) const {
  const LoaderOptions& o = options;
  const int64_t step = index / o.micro_steps, micro_step = index % o.micro_steps;
  const int64_t first = o.first_sequence + ((step * o.world + o.rank) * o.micro_steps + micro_step) * o.micro_batch;
  Batch batch = empty_batch(o.micro_batch, o.seq_len);
  batch.rows = o.micro_batch;
  for (int64_t row = 0; row < o.micro_batch; ++row)
    read_row(batch, row, *source, sequence_position(first + row, n_sequences, o.seed), o.seq_len);
  return batch;
}

void Loader::Shared::read_ahead() {
  try {
    for (int64_t index = 0;; ++index) {
      Batch batch = read(index);
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return stop || static_cast<int64_t>(ready.size()) < options.prefetch; });
      if (stop) return;
      ready.push_back(std::move(batch));
      lock.unlock();
      changed.notify_all();
    }
  } catch (...) {
    const std::lock_guard lock(mutex);
    error = std::current_exception();
    changed.notify_all();
  }
}

Batch Loader::next() {
  std::unique_lock lock(shared_->mutex);
  const auto has_news = [&] { return !shared_->ready.empty() || shared_->error; };
  // In slices, so that the time during which the whole process was suspended does not count.
  constexpr double kSliceS = 1;
  for (double left_s = shared_->options.stall_s;
       !shared_->changed.wait_for(lock, std::chrono::duration<double>(std::min(left_s, kSliceS)), has_news);) {
    left_s -= kSliceS;
    if (left_s > 0) continue;
    fail("{}: batch {} of this run has not been read after {} s (data.stall_s): does its disk or file system hang?",
         shared_->source->name(), taken_, shared_->options.stall_s);
  }
  if (shared_->ready.empty()) std::rethrow_exception(shared_->error);
  Batch batch = std::move(shared_->ready.front());
  shared_->ready.pop_front();
  ++taken_;
  lock.unlock();
  shared_->changed.notify_all();
  return batch;
}

int64_t Loader::cursor() const {
  const LoaderOptions& o = shared_->options;
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
  for (int64_t row = 0; row < batch.rows; ++row) read_row(batch, row, source, first + row, seq_len);
  return batch;
}

}  // namespace triad
