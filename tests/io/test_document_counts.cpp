// What rows hold of documents, counted token by token over rows, batches and whole epochs: parts by length, padding,
// and tokens that cuts separate from their document.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "engine/rng.h"
#include "io/data/best_fit.h"
#include "io/data/loader.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// A source with `n` documents, 1 to `longest` bytes each, except some far longer.
std::shared_ptr<const TokenSource> random_source(const TemporaryFolder& folder, int64_t n, int64_t longest) {
  const Philox random(31, static_cast<uint64_t>(longest));
  std::string text;
  for (int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<uint64_t>(2 * i);
    const auto length = static_cast<size_t>(1 + random.below(at, static_cast<uint64_t>(longest)));
    const bool far = random.below(at + 1, 40) == 0;
    const std::string document(far ? 10 * length : length, static_cast<char>('a' + i % 26));
    text += fmt::format("{{\"text\":\"{}\"}}\n", document);
  }
  write_text(folder.file("a.jsonl"), text);
  return text_data({.paths = {folder.file("a.jsonl")}, .val_paths = {}}, *make_tokenizer("byte")).train;
}

// Row counts, from the contents: token 0 is the separator, a document's first token.
struct Counted {
  RowDocuments documents;
  std::vector<int64_t> parts, paddings;

  explicit Counted(int64_t T) : parts(static_cast<size_t>(T + 1)), paddings(parts) {}
  // Adds a row. Its padding is the separators without a target at its end.
  void add(const Row& row) {
    const auto T = static_cast<int64_t>(row.tokens.size());
    int64_t end = T;
    while (end > 0 && row.tokens[end - 1] == 0 && row.targets[end - 1] == -1) --end;
    for (size_t i = 0; i < row.begins.size(); ++i) {
      const int64_t begin = row.begins[i], next = i + 1 < row.begins.size() ? row.begins[i + 1] : T;
      if (begin >= end) {
        ++paddings[next - begin];
        continue;
      }
      ++documents.documents;
      ++parts[next - begin];
      if (row.tokens[begin] != 0) documents.cut += next - begin;
    }
    documents.padded += T - end;
  }
};

template <class Read>
Counted count_rows(int64_t T, int64_t rows, RowDocuments& told, Read&& read) {
  Counted counted(T);
  std::vector<int32_t> tokens(static_cast<size_t>(T)), targets = tokens;
  for (int64_t i = 0; i < rows; ++i) {
    Row row{tokens, targets};
    read(i, row);
    counted.add(row);
    told.add(row.documents);
  }
  return counted;
}

}  // namespace

TEST_CASE("documents: counts of stream rows are those of their tokens", "[data]") {
  const TemporaryFolder folder;
  for (const int64_t longest : {3, 30, 200}) {
    const auto source = random_source(folder, 400, longest);
    for (const int64_t T : {1, 7, 64}) {
      INFO("documents up to " << longest << ", T = " << T);
      const int64_t rows = count_sequences(*source, T);
      RowDocuments told;
      const Counted counted =
          count_rows(T, rows, told, [&](int64_t i, Row& row) { read_stream_row(*source, i * T, true, row); });
      CHECK(told.documents == counted.documents.documents);
      CHECK(told.cut == counted.documents.cut);
      CHECK(told.padded == 0);
      const RowDivision division = divide_rows(*source->documents(), rows, T);
      CHECK(division.documents == told.documents);
      CHECK(division.cut_tokens == told.cut);
      CHECK(division.parts == counted.parts);
      RowDocuments across;
      count_rows(T, 1, across, [&](int64_t i, Row& row) { read_stream_row(*source, i * T, false, row); });
      CHECK(across.documents == 0);
      CHECK(across.cut == 0);
    }
  }
}

TEST_CASE("best_fit: counts of an epoch's rows are those of their tokens", "[data]") {
  const TemporaryFolder folder;
  for (const int64_t most : {3, 100}) {
    const auto source = random_source(folder, 3000, 60);
    constexpr int64_t T = 64;
    const RowOptions options = {
        .seq_len = T, .packing = Packing::best_fit, .max_documents = most, .seed = 4, .within = true};
    const PackingStats stats = measure_best_fit(*source, options);
    const auto rows = make_rows(source, options);
    RowDocuments told;
    const Counted counted = count_rows(T, stats.rows, told, [&](int64_t i, Row& row) { rows->read(i, row); });
    INFO("at most " << most << " documents a row");
    CHECK(stats.pieces == counted.documents.documents);
    CHECK(stats.parts == counted.parts);
    CHECK(stats.paddings == counted.paddings);
    CHECK(stats.padded == counted.documents.padded);
    CHECK(stats.dropped > 0);
    CHECK(stats.padded > 0);
    CHECK(stats.cut_tokens == counted.documents.cut + stats.dropped);  // dropped tokens are in no row
    CHECK(told.documents == stats.pieces);
    CHECK(told.padded == stats.padded);
    CHECK(told.cut == stats.cut_tokens);
  }
}

TEST_CASE("documents: a batch has the sums of its rows' counts", "[data]") {
  const TemporaryFolder folder;
  const auto source = random_source(folder, 3000, 60);
  constexpr int64_t T = 64, kRows = 5;
  for (const Packing packing : {Packing::stream, Packing::best_fit}) {
    const auto rows =
        make_rows(source, {.seq_len = T, .packing = packing, .max_documents = 3, .seed = 4, .within = true});
    Loader loader(
        source,
        {.seq_len = T, .micro_batch = kRows, .packing = packing, .max_documents = 3, .seed = 4, .within = true});
    for (int64_t step = 0; step < 3; ++step) {
      RowDocuments sum;
      count_rows(T, kRows, sum, [&](int64_t i, Row& row) { rows->read(step * kRows + i, row); });
      const Batch batch = loader.next();
      CHECK(batch.documents.documents == sum.documents);
      CHECK(batch.documents.padded == sum.padded);
      CHECK(batch.documents.cut == sum.cut);
      CHECK(sum.documents > kRows);
    }
  }
}
