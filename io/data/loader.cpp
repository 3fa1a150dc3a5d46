#include "io/data/loader.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "engine/check.h"

namespace triad {

namespace {

// Views of the tokens and targets in row number `row`, for the token source to fill.
Row row_of(Batch& batch, int64_t row, int64_t seq_len) {
  const auto row_span = [&](std::vector<int32_t>& values) {
    return std::span(values).subspan(static_cast<size_t>(row * seq_len), static_cast<size_t>(seq_len));
  };
  return {row_span(batch.tokens), row_span(batch.targets)};
}

// Appends the document bounds in row number `row`; for a row without a sequence, `begins` is {0}.
void add_bounds(Batch& batch, int64_t row, int64_t seq_len, const std::vector<int32_t>& begins) {
  for (const int32_t begin : begins) batch.bounds.push_back(static_cast<int32_t>(row * seq_len) + begin);
}

// Completes batch.bounds: adds a bound for each row without a sequence, and the last one, the batch's token count.
void end_bounds(Batch& batch, int64_t micro_batch, int64_t seq_len) {
  for (int64_t row = batch.rows; row < micro_batch; ++row) add_bounds(batch, row, seq_len, {0});
  batch.bounds.push_back(static_cast<int32_t>(micro_batch * seq_len));
}

Batch empty_batch(int64_t rows, int64_t seq_len) {
  const auto n = static_cast<size_t>(rows * seq_len);
  Batch batch;
  batch.tokens.assign(n, 0);
  batch.targets.assign(n, -1);
  return batch;
}

}  // namespace

Loader::Loader(Mixture data, const LoaderOptions& options) : shared_(std::make_shared<Shared>()) {
  const LoaderOptions& o = options;
  shared_->rows = make_rows(data, {.seq_len = o.seq_len,
                                   .block = o.block,
                                   .packing = o.packing,
                                   .max_documents = o.max_documents,
                                   .seed = o.seed,
                                   .within = o.within,
                                   .known = o.known});
  TRIAD_CHECK(o.micro_batch >= 1 && o.micro_steps >= 1 && o.prefetch >= 1 && o.first_sequence >= 0 && o.rank >= 0 &&
                  o.rank < o.world && o.stall_s > 0,
              "loader: micro_batch {}, micro_steps {}, rank {} of {}, first_sequence {}, prefetch {}, stall_s {}",
              o.micro_batch, o.micro_steps, o.rank, o.world, o.first_sequence, o.prefetch, o.stall_s);
  shared_->data = std::move(data);
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

void Loader::Shared::count(int64_t step) {
  if (step == counted_step) return;
  const int64_t step_sequences = options.world * options.micro_steps * options.micro_batch;
  n_targets = 0, n_tokens = step_sequences * options.seq_len;
  for (int64_t i = 0; i < step_sequences; ++i) {
    const int64_t row = options.first_sequence + step * step_sequences + i;
    n_targets += rows->count_targets(row);
    n_tokens -= rows->count_padding(row);
  }
  counted_step = step;
}

Batch Loader::Shared::read(int64_t index) {
  const LoaderOptions& o = options;
  const int64_t step = index / o.micro_steps, micro_step = index % o.micro_steps;
  const int64_t first = o.first_sequence + ((step * o.world + o.rank) * o.micro_steps + micro_step) * o.micro_batch;
  Batch batch = empty_batch(o.micro_batch, o.seq_len);
  batch.rows = o.micro_batch;
  count(step);
  batch.step_targets = n_targets, batch.step_tokens = n_tokens;
  batch.groups = rows->groups_of(first);
  for (int64_t i = 0; i < o.micro_batch; ++i) {
    Row row = row_of(batch, i, o.seq_len);
    rows->read(first + i, row);
    add_bounds(batch, i, o.seq_len, row.begins);
    batch.documents.add(row.documents);
    batch.padding_begin.push_back(static_cast<int32_t>(o.seq_len - row.documents.padded));
  }
  if (o.within) end_bounds(batch, o.micro_batch, o.seq_len);
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
  // The wait consists of slices this long, so that time while the whole process was suspended does not count.
  constexpr double kSliceS = 0.25;
  int64_t packed = shared_->rows->groups_packed();
  for (double left_s = shared_->options.stall_s;
       !shared_->changed.wait_for(lock, std::chrono::duration<double>(std::min(left_s, kSliceS)), has_news);) {
    left_s -= kSliceS;
    if (const int64_t now = shared_->rows->groups_packed(); std::exchange(packed, now) != now) {
      left_s = shared_->options.stall_s;
      if (shared_->options.advances) shared_->options.advances();
    }
    if (left_s > 0) continue;
    fail("{}: batch {} of this run has not been read after {} s (data.stall_s): does its disk or file system hang?",
         shared_->data.name(), taken_, shared_->options.stall_s);
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

int64_t count_validation_batches(const Mixture& data, int64_t seq_len, int64_t micro_batch, int64_t count) {
  return std::min(count, (count_rows(data, seq_len, count * micro_batch) - 1) / micro_batch + 1);
}

Batch validation_batch(const Mixture& data, int64_t seq_len, int64_t micro_batch, int64_t index, bool within) {
  const int64_t first = index * micro_batch;
  Batch batch = empty_batch(micro_batch, seq_len);
  batch.rows = count_rows(data, seq_len, first + micro_batch) - first;
  Draws draws(data.shares());
  for (int64_t i = 0; i < batch.rows; ++i) {
    Row row = row_of(batch, i, seq_len);
    const Draws::Draw draw = draws(first + i);
    read_stream_row(*data.sources()[draw.component], draw.number * seq_len, within, row);
    add_bounds(batch, i, seq_len, row.begins);
  }
  if (within) end_bounds(batch, micro_batch, seq_len);
  return batch;
}

}  // namespace triad
