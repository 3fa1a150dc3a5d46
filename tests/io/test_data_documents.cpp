// Documents in the loader: bounds and targets by hand, counts against brute force, and errors for data without known
// documents.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <memory>
#include <set>
#include <tuple>

#include "engine/check.h"
#include "engine/rng.h"
#include "io/data/best_fit.h"
#include "io/data/loader.h"
#include "io/data/shards.h"
#include "io/json_config.h"
#include "tests/support/corpus.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/run/data_source.h"

using namespace triad;
using namespace triad::test;

namespace {

using Tokens = std::vector<int32_t>;

// A folder with one shard, train_000000.bin, and a manifest that names its separator.
class ShardFolder {
 public:
  ShardFolder(const Tokens& tokens, const Json& manifest_keys) {
    ShardWriter writer(folder_.file("train_000000.bin"), TokenWidth::u16);
    writer.append(tokens);
    writer.finish();
    Json manifest = {{"format", "llm.c u16"},
                     {"tokenizer", "byte"},
                     {"vocab_size", 256},
                     {"train", {{"shards", {{{"file", "train_000000.bin"}}}}}},
                     {"val", {{"shards", Json::array()}}}};
    manifest.update(manifest_keys);
    write_text(folder_.file("manifest.json"), manifest.dump());
  }
  const std::string& path() const { return folder_.path(); }
  std::shared_ptr<const TokenSource> open(double val_fraction = 0) const { return split(val_fraction).train; }
  DataSplit split(double val_fraction) const {
    return shard_data({.paths = {folder_.path()}, .val_paths = {}, .val_fraction = val_fraction}, 256);
  }

 private:
  TemporaryFolder folder_;
};

// Documents in tokens [begin, begin + T), found token by token: where each first token is in the row.
Tokens begins_of(const Tokens& all, int64_t begin, int64_t T, int32_t eot, bool last) {
  Tokens begins = {0};
  for (int64_t i = 1; i < T; ++i)
    if (all[begin + i - last] == eot) begins.push_back(static_cast<int32_t>(i));
  return begins;
}

Tokens random_documents(int64_t size, int64_t mean, uint64_t stream) {
  const Philox random(5, stream);
  Tokens tokens;
  for (int64_t i = 0; i < size; ++i) {
    const bool separator = random.below(static_cast<uint64_t>(2 * i), static_cast<uint64_t>(mean)) == 0;
    tokens.push_back(separator ? 9 : 10 + static_cast<int32_t>(random.below(static_cast<uint64_t>(2 * i + 1), 200)));
  }
  return tokens;
}

Config config_of(const std::vector<std::string>& sets) {
  Config config = load_config(kTiny, sets).config;
  resolve_shards(config);
  return config;
}

}  // namespace

TEST_CASE("documents: bounds and targets of shards whose documents begin with the separator", "[data]") {
  const ShardFolder folder({9, 1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 8, 1}, {{"eot", 9}});
  const auto source = folder.open();
  REQUIRE(source->documents() != nullptr);
  CHECK(source->documents()->begins == std::vector<int64_t>{0, 3, 5, 6});
  const Batch both = validation_batch(source, 4, 2, 0, /*within=*/true);
  CHECK(both.tokens == Tokens{9, 1, 2, 9, 3, 9, 9, 4});
  CHECK(both.targets == Tokens{1, 2, 9, 3, 9, 9, 4, 5});
  CHECK(both.bounds == Tokens{0, 3, 4, 5, 6, 8});
  // The last row is mid-document; the other one holds no sequence.
  const Batch last = validation_batch(source, 4, 2, 1, /*within=*/true);
  CHECK(last.targets == Tokens{6, 7, 8, 1, -1, -1, -1, -1});
  CHECK(last.bounds == Tokens{0, 4, 8});
  CHECK(validation_batch(source, 4, 2, 0).bounds.empty());
  Loader loader(source, {.seq_len = 4, .micro_batch = 1, .within = true});
  CHECK(loader.next().step_targets == 4);
}

TEST_CASE("documents: a separator that is a document's last token has no target", "[data]") {
  const ShardFolder folder({9, 1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 8, 1}, {{"eot", 9}, {"eot_position", "last"}});
  const auto source = folder.open();
  const Batch both = validation_batch(source, 4, 2, 0, /*within=*/true);
  CHECK(both.targets == Tokens{-1, 2, 9, -1, 9, -1, -1, 5});
  CHECK(both.bounds == Tokens{0, 1, 4, 6, 7, 8});
  CHECK(validation_batch(source, 4, 2, 1, /*within=*/true).bounds == Tokens{0, 4, 8});
  CHECK(validation_batch(source, 4, 2, 0).targets == Tokens{1, 2, 9, 3, 9, 9, 4, 5});  // attention across documents
  // One epoch's three rows in one step, on three ranks.
  for (int64_t rank = 0; rank < 3; ++rank) {
    Loader loader(source, {.seq_len = 4, .micro_batch = 1, .within = true, .rank = rank, .world = 3});
    CHECK(loader.next().step_targets == 2 + 2 + 4);
  }
}

TEST_CASE("documents: text files are documents, the last part of one text is for validation", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.txt"), "ab");
  write_text(folder.file("b.txt"), "c");
  write_text(folder.file("c.txt"), "");
  const auto tokenizer = make_tokenizer("byte");
  const auto source = text_data({.paths = {folder.file("*.txt")}, .val_paths = {}}, *tokenizer).train;
  REQUIRE(source->documents() != nullptr);
  CHECK(source->documents()->begins == std::vector<int64_t>{0, 3});
  CHECK(source->documents()->end(1) == 5);
  CHECK(source->documents()->after_end == tokenizer->eot());
  // The split by position cuts the only document: no separator follows the part for training.
  const DataSplit split =
      text_data({.paths = {folder.file("a.txt")}, .val_paths = {}, .val_fraction = 0.4}, *tokenizer);
  REQUIRE(split.val->size() == 1);
  CHECK(split.train->documents()->begins == std::vector<int64_t>{0});
  CHECK(split.train->documents()->after_end == -1);
  CHECK(split.val->documents()->begins == std::vector<int64_t>{0});
  CHECK(split.val->documents()->after_end == tokenizer->eot());
}

TEST_CASE("documents: rows, counts and the division of rows agree with brute force", "[data]") {
  for (const bool last : {false, true}) {
    for (const auto& [size, mean, T] :
         {std::tuple<int64_t, int64_t, int64_t>{700, 3, 16}, {3000, 40, 32}, {90, 1, 8}}) {
      const Tokens all = random_documents(size, mean, last ? 1 : 2);
      const ShardFolder folder(all, {{"eot", 9}, {"eot_position", last ? "last" : "first"}});
      for (const double val_fraction : {0.0, 0.3}) {
        const DataSplit split = folder.split(val_fraction);
        int64_t first = 0;  // where the part begins in `all`
        for (const auto& source : {split.train, split.val}) {
          const int64_t rows = source->size() > T ? count_sequences(*source, T) : 0;
          RowDivision expected;
          for (int64_t row = 0; row < rows; ++row) {
            const Tokens begins = begins_of(all, first + row * T, T, 9, last);
            Batch batch = validation_batch(source, T, 1, row, /*within=*/true);
            Tokens bounds = begins;
            bounds.push_back(static_cast<int32_t>(T));
            CHECK(batch.bounds == bounds);
            for (int64_t i = 0; i < T; ++i) {
              const int64_t at = first + row * T + i;
              CHECK(batch.tokens[i] == all[at]);
              CHECK(batch.targets[i] == (last && all[at] == 9 ? -1 : all[at + 1]));
            }
            const auto n = T - std::count(batch.targets.begin(), batch.targets.end(), -1);
            CHECK(count_stream_targets(*source, row * T, T, true) == n);
            const auto documents = static_cast<int64_t>(begins.size());
            expected.documents += documents;
            if (documents > expected.most) expected.most = documents, expected.fullest = row;
            const int64_t end = first + (row + 1) * T;
            expected.cut += row + 1 < rows && !(last ? all[end - 1] == 9 : all[end] == 9);
          }
          const RowDivision division =
              source->documents() == nullptr ? RowDivision{} : divide_rows(*source->documents(), rows, T);
          CHECK(division.most == expected.most);
          CHECK(division.fullest == expected.fullest);
          CHECK(division.documents == expected.documents);
          // `cut` counts a document once, however many rows it spans, so brute force has an upper bound.
          CHECK(division.cut <= expected.cut);
          CHECK((division.cut > 0) == (expected.cut > 0));
          first += source->size();
        }
      }
    }
  }
}

TEST_CASE("documents: data without known documents, and rows with too many, are refused", "[data]") {
  const Tokens all = random_documents(600, 5, 3);
  const ShardFolder known(all, {{"eot", 9}}), unknown(all, Json::object());
  const auto open = [](const std::string& paths, std::vector<std::string> more) {
    more.insert(more.end(), {"data.kind=shards", "data.paths=" + paths, "data.val_fraction=0"});
    return open_data(config_of(more));
  };
  const std::string within = "data.documents=attend_within";
  check_error([&] { open(unknown.path(), {within}); },
              {"train_000000.bin", "not known", "manifest.json", "data.documents=attend_across"});
  check_error([&] { open_data(config_of({within})); }, {"kind synthetic", "data.documents=attend_across"});
  check_error([&] { open_data(config_of({within, "data.kind=needle", "train.seq_len=512"})); }, {"kind needle"});
  CHECK(open(unknown.path(), {}).most_documents == 0);
  CHECK(open(known.path(), {"data.documents=attend_across"}).most_documents == 0);
  const int64_t most = open(known.path(), {within}).most_documents;
  CHECK(most > 5);
  CHECK(open(known.path(), {}).most_documents == most);
  CHECK(open(known.path(), {within, fmt::format("data.max_documents={}", most)}).most_documents == most);
  CHECK(open(known.path(), {within, "data.max_documents=40"}).most_documents == 40);
  const std::string row =
      std::to_string(divide_rows(*known.open()->documents(), count_sequences(*known.open(), 48), 48).fullest);
  check_error(
      [&] {
        open(known.path(), {within, fmt::format("data.max_documents={}", most - 1)});
      },
      {"row " + row + " (", fmt::format("has {} documents", most), "data.max_documents"});
  check_error([&] { ShardFolder(all, {{"eot", 256}}).open(); }, {"manifest.json", "eot is 256"});
  check_error([&] { ShardFolder(all, {{"eot", 9}, {"eot_position", "middle"}}).open(); }, {"eot_position", "middle"});
  // Without documents to separate, data.max_documents limits nothing unless rows are packed.
  for (const std::string& across : {known.path(), unknown.path()})
    check_error(
        [&] {
          open(across, {"data.documents=attend_across", "data.max_documents=40"});
        },
        {"data.max_documents is 40", "attend_across"});
  check_error([&] { open(unknown.path(), {"data.max_documents=7"}); }, {"data.max_documents is 7"});
  check_error([&] { planned_documents(config_of({"data.max_documents=7"})); }, {"data.max_documents is 7"});
  open(known.path(), {"data.documents=attend_across", "data.packing=best_fit", "data.max_documents=40"});
}

TEST_CASE("documents: a manifest with a value of the wrong type, or a separator that never occurs, is refused",
          "[data]") {
  const Tokens all = random_documents(600, 5, 3);
  const auto refused = [&](const Json& keys, const std::string& key, const std::string& value) {
    INFO(keys.dump());
    check_error([&] { ShardFolder(all, keys).open(); }, {"manifest.json is damaged", "its " + key + " is " + value});
  };
  refused({{"eot", "9"}}, "eot", "\"9\"");
  refused({{"eot", 9.0}}, "eot", "9.0");
  refused({{"eot", 9.5}}, "eot", "9.5");
  refused({{"eot", true}}, "eot", "true");
  refused({{"eot", nullptr}}, "eot", "null");
  refused({{"eot", -2}}, "eot", "-2");
  refused({{"eot", std::numeric_limits<uint64_t>::max()}}, "eot", "18446744073709551615");
  refused({{"eot_position", 1}}, "eot_position", "1");
  refused({{"vocab_size", "256"}}, "vocab_size", "\"256\"");
  refused({{"vocab_size", 0}}, "vocab_size", "0");
  refused({{"tokenizer", 3}}, "tokenizer", "3");
  refused({{"train", Json::array()}}, "train", "[]");
  refused({{"train", Json::object()}}, "train.shards", "absent");
  refused({{"val", {{"shards", "none"}}}}, "val.shards", "\"none\"");
  refused({{"val", {{"shards", {3}}}}}, "val.shards[0]", "3");
  refused({{"val", {{"shards", {{{"file", 3}}}}}}}, "val.shards[0].file", "3");
  const auto with_shard = [](const Json& shard) { return Json{{"val", {{"shards", Json::array({shard})}}}}; };
  for (const char* name : {"../x.bin", "/x.bin", "a/x.bin", "..", ".", ""}) {
    const std::string file(name);
    refused(with_shard({{"file", file}}), "val.shards[0].file", brief(Json(file)) + ": a file name");
    refused({{"tokenizer", "bpe"}, {"tokenizer_files", {{{"file", file}, {"crc32", "0"}, {"bytes", 3}}}}},
            "tokenizer_files[0].file", brief(Json(file)) + ": a file name");
  }
  for (const char* key : {"tokens", "bytes", "learned"}) {
    refused(with_shard({{"file", "a"}, {key, "3"}}), fmt::format("val.shards[0].{}", key), "\"3\"");
    refused(with_shard({{"file", "a"}, {key, -1}}), fmt::format("val.shards[0].{}", key), "-1");
  }
  for (const char* crc : {"", "0123456", "012345678", "0123456g", "-1234567", "0x123456"})
    refused(with_shard({{"file", "a"}, {"crc32", crc}}), "val.shards[0].crc32", brief(Json(crc)) + ": a CRC-32");
  refused({{"tokenizer", "bpe"}, {"tokenizer_files", {{{"file", "a"}, {"crc32", "0"}}}}}, "tokenizer_files[0].bytes",
          "absent");
  const auto with_documents = [&](const Json& documents, int32_t eot) {
    return Json{{"eot", eot}, {"train", {{"documents", documents}, {"shards", {{{"file", "train_000000.bin"}}}}}}};
  };
  refused(with_documents("2", 9), "train.documents", "\"2\"");
  check_error([&] { ShardFolder(all, with_documents(2, 5)).open(); },
              {"manifest.json: its eot is 5", "train_000000.bin", "2 documents"});
  CHECK(ShardFolder(all, with_documents(1, 5)).open()->documents()->count() == 1);
  CHECK(ShardFolder(all, with_documents(2, 9)).open()->documents()->count() > 2);
}

TEST_CASE("documents: packed text is decompressed", "[data]") {
  const TemporaryFolder folder;
  const ByteTokenizer tokenizer;
  write_text(folder.file("plain.txt"), "some text");
  write_text(folder.file("a.txt.gz"), gzip("some text"));
  write_text(folder.file("b.txt.zst"), zstd("some text"));
  write_text(folder.file("empty.gz"), gzip(""));
  write_text(folder.file("c.txt.bz2"), "BZh91AY");
  const auto tokens = [&](const std::string& name) {
    const auto source = open_tokens({folder.file(name)}, tokenizer, 256);
    Tokens all(static_cast<size_t>(source->size()));
    source->read(0, all);
    return all;
  };
  CHECK(tokens("plain.txt").size() == 10);
  CHECK(tokens("a.txt.gz") == tokens("plain.txt"));
  CHECK(tokens("b.txt.zst") == tokens("plain.txt"));
  check_error([&] { tokens("empty.gz"); }, {"empty.gz", "no document"});
  check_error([&] { tokens("c.txt.bz2"); }, {"c.txt.bz2", "bzip2"});
}

TEST_CASE("documents: each line of a JSONL file is a document, and the seed chooses those for validation", "[data]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.jsonl"), "{\"text\":\"ab\"}\n{\"text\":\"\"}\n\n{\"text\":\"c\", \"id\":7}\n");
  write_text(folder.file("b.txt"), "de");
  const auto tokenizer = make_tokenizer("byte");
  const auto source = text_data({.paths = {folder.file("*")}, .val_paths = {}}, *tokenizer).train;
  Tokens tokens(static_cast<size_t>(source->size()));
  source->read(0, tokens);
  CHECK(tokens == Tokens{0, 'a', 'b', 0, 'c', 0, 'd', 'e'});
  CHECK(source->documents()->begins == std::vector<int64_t>{0, 3, 5});
  const DataSplit split =
      text_data({.paths = {folder.file("*")}, .val_paths = {}, .val_fraction = 0.34, .seed = 3}, *tokenizer);
  CHECK(split.train->documents()->count() == 2);
  CHECK(split.val->documents()->count() == 1);
  CHECK(split.train->size() + split.val->size() == 8);
  write_text(folder.file("c.jsonl"), "{\"txt\":1}\n");
  check_error([&] { text_data({.paths = {folder.file("*")}, .val_paths = {}}, *tokenizer); }, {"c.jsonl", "line 1"});
}

namespace {

// best_fit by search through a plain list.
Packed pack_by_search(const std::vector<Piece>& documents, const PackingLimits& limits) {
  Packed packed;
  std::vector<Piece> left = documents;
  while (!left.empty()) {
    packed.rows.emplace_back();
    int64_t rest = limits.seq_len;
    while (rest > 0 && !left.empty() && static_cast<int64_t>(packed.rows.back().size()) < limits.max_documents) {
      const auto seen = std::min<size_t>(left.size(), static_cast<size_t>(limits.buffered));
      size_t best = seen, shortest = 0;
      for (size_t i = 0; i < seen; ++i) {
        if (left[i].length <= rest && (best == seen || left[i].length > left[best].length)) best = i;
        if (left[i].length < left[shortest].length) shortest = i;
      }
      const size_t chosen = best < seen ? best : shortest;
      Piece piece = left[chosen];
      if (piece.length > rest) ++packed.cut, packed.dropped += piece.length - rest, piece.length = rest;
      rest -= piece.length;
      packed.rows.back().push_back(piece);
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(chosen));
    }
    packed.padded += rest;
  }
  return packed;
}

// A run's tokens, targets and begins in rows [first, first + n), as text.
std::vector<std::string> rows_of(RowSource& source, int64_t first, int64_t n, int64_t T) {
  std::vector<std::string> rows;
  for (int64_t k = first; k < first + n; ++k) {
    Tokens tokens(static_cast<size_t>(T)), targets = tokens;
    Row row{tokens, targets};
    source.read(k, row);
    rows.push_back(
        fmt::format("{} | {} | {}", fmt::join(tokens, " "), fmt::join(targets, " "), fmt::join(row.begins, " ")));
    CHECK(source.count_targets(k) == T - std::count(targets.begin(), targets.end(), -1));
  }
  return rows;
}

}  // namespace

TEST_CASE("best_fit: the packing is that of a search through the documents", "[data]") {
  const Philox random(11, 0);
  uint64_t drawn = 0;
  for (const auto& [n, T, most, buffered] : {std::tuple<int64_t, int64_t, int64_t, int64_t>{1, 8, 8, 4},
                                             {300, 64, 100, 10},
                                             {300, 64, 3, 1000},
                                             {500, 20, 8, 1}}) {
    std::vector<Piece> documents;
    int64_t begin = 0, tokens = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t length = 1 + static_cast<int64_t>(random.below(drawn++, static_cast<uint64_t>(T)));
      documents.push_back({begin, length});
      begin += length;
    }
    const PackingLimits limits = {.seq_len = T, .max_documents = most, .buffered = buffered};
    const Packed packed = pack_best_fit(documents, limits), expected = pack_by_search(documents, limits);
    REQUIRE(packed.rows.size() == expected.rows.size());
    for (size_t row = 0; row < packed.rows.size(); ++row) {
      REQUIRE(packed.rows[row].size() == expected.rows[row].size());
      CHECK(static_cast<int64_t>(packed.rows[row].size()) <= most);
      for (size_t i = 0; i < packed.rows[row].size(); ++i) {
        CHECK(packed.rows[row][i].begin == expected.rows[row][i].begin);
        CHECK(packed.rows[row][i].length == expected.rows[row][i].length);
        tokens += packed.rows[row][i].length;
      }
    }
    CHECK(packed.cut == expected.cut);
    CHECK(packed.dropped == expected.dropped);
    CHECK(packed.padded == expected.padded);
    CHECK(tokens + packed.dropped == begin);
    CHECK(tokens + packed.padded == static_cast<int64_t>(packed.rows.size()) * T);
  }
}

TEST_CASE("best_fit: tokens, targets and padding by hand", "[data]") {
  // Documents with 6, 3 and 2 tokens, T = 4: pieces with 4, 2, 3 and 2 tokens, in an order that the seed decides.
  const Tokens all = {9, 1, 2, 3, 4, 5, 9, 6, 7, 9, 8};
  for (const bool last : {false, true}) {
    const ShardFolder folder(last ? Tokens{1, 2, 3, 4, 5, 9, 6, 7, 9, 8, 9} : all,
                             {{"eot", 9}, {"eot_position", last ? "last" : "first"}});
    const auto rows = best_fit_rows(folder.open(), {.seq_len = 4, .max_documents = 8, .within = true});
    std::vector<std::string> got = rows_of(*rows, 0, 3, 4);
    std::sort(got.begin(), got.end());
    // After the 3-token piece nothing fits, so the first 2-token piece is cut; the second one is padded.
    const std::vector<std::string> either[] = {
        {"9 1 2 3 | 1 2 3 4 | 0", "9 6 7 4 | 6 7 9 5 | 0 3", "9 8 9 9 | 8 9 -1 -1 | 0 2 3"},
        {"4 5 9 9 | 5 9 -1 -1 | 0 2 3", "9 1 2 3 | 1 2 3 4 | 0", "9 6 7 9 | 6 7 9 8 | 0 3"},
        {"1 2 3 4 | 2 3 4 5 | 0", "6 7 9 5 | 7 9 -1 9 | 0 3", "8 9 9 9 | 9 -1 -1 -1 | 0 2 3"},
        {"1 2 3 4 | 2 3 4 5 | 0", "5 9 9 9 | 9 -1 -1 -1 | 0 2 3", "6 7 9 8 | 7 9 -1 9 | 0 3"}};
    CHECK(std::count(either + 2 * last, either + 2 * last + 2, got) == 1);
  }
}

TEST_CASE("best_fit: a search for the first row that goes on is no hang", "[data]") {
  // Rows far into the run, which are found only after all groups before them are packed, and a limit for a wait that is
  // short against that. On a machine fast enough to pack them within it, nothing is left to see.
  const Tokens all = random_documents(60000, 12, 4);
  const ShardFolder folder(all, {{"eot", 9}});
  int64_t calls = 0;
  Loader loader(folder.open(), {.seq_len = 32,
                                .micro_batch = 1,
                                .packing = Packing::best_fit,
                                .max_documents = 8,
                                .seed = 5,
                                .within = true,
                                .first_sequence = 2'000'000,
                                .stall_s = 1,
                                .advances = [&] { ++calls; }});
  const Batch batch = loader.next();
  CHECK(batch.groups.at(0).group > 1000);
  CHECK(batch.groups.at(0).first_row <= 2'000'000);
  INFO(calls << " calls while the first row was searched");
  CHECK(calls > 0);
}

TEST_CASE("best_fit: an epoch holds every document, rows depend on seed and number alone, ranks share a step",
          "[data]") {
  constexpr int64_t T = 32;
  const Tokens all = random_documents(60000, 12, 4);  // several groups
  const ShardFolder folder(all, {{"eot", 9}});
  const auto source = folder.open();
  const RowOptions options = {
      .seq_len = T, .packing = Packing::best_fit, .max_documents = 8, .seed = 5, .within = true};
  const PackingStats stats = measure_best_fit(*source, options);
  const auto rows = make_rows(source, options);
  const std::vector<std::string> whole = rows_of(*rows, 0, 2 * stats.rows, T);
  int64_t tokens = 0, targets = 0;
  for (int64_t k = 0; k < stats.rows; ++k) {
    Tokens row_tokens(T), row_targets(T);
    Row row{row_tokens, row_targets};
    rows->read(k, row);
    targets += rows->count_targets(k);
    CHECK(row.begins.size() <= 9);  // max_documents and one for padding
    for (int64_t i = 0; i < T; ++i) tokens += row_targets[i] >= 0 || row_tokens[i] != 9;
  }
  CHECK(targets == stats.rows * T - stats.padded);
  CHECK(tokens + stats.dropped == static_cast<int64_t>(all.size()));
  CHECK(std::set<std::string>(whole.begin(), whole.begin() + stats.rows) !=
        std::set<std::string>(whole.begin() + stats.rows, whole.end()));  // the next epoch packs other documents
  // A resume mid-group, and in the next epoch.
  for (const int64_t from : {int64_t{1}, int64_t{300}, stats.rows - 1, stats.rows + 77}) {
    const std::vector<std::string> part = rows_of(*make_rows(source, options), from, 20, T);
    CHECK(std::equal(part.begin(), part.end(), whole.begin() + from));
  }
  // A resume that knows a group packs no group before it, only the row's group and the next.
  const RowGroup group = rows->groups_of(stats.rows + 77).at(0);
  CHECK(group.group >= 2);
  CHECK(group.first_row <= stats.rows + 77);
  RowOptions knows = options;
  knows.known = {group};
  const auto later = make_rows(source, knows), unknown = make_rows(source, options);
  const std::vector<std::string> part = rows_of(*later, stats.rows + 77, 20, T);
  CHECK(std::equal(part.begin(), part.end(), whole.begin() + stats.rows + 77));
  CHECK(later->groups_of(stats.rows + 77).at(0).first_row == group.first_row);
  CHECK(later->groups_packed() <= 2);
  rows_of(*unknown, stats.rows + 77, 20, T);
  CHECK(unknown->groups_packed() > group.group);
  CHECK(rows_of(*later, 1, 20, T) == rows_of(*rows, 1, 20, T));  // rows before the known group are found, too
  RowOptions other = options;
  other.seed = 6;
  CHECK(rows_of(*make_rows(source, other), 0, 3, T) != rows_of(*rows, 0, 3, T));
  // Two ranks read one rank's rows.
  const auto loader_of = [&](int64_t rank, int64_t world, int64_t micro_steps) {
    return std::make_unique<Loader>(source, LoaderOptions{.seq_len = T,
                                                          .micro_batch = 3,
                                                          .micro_steps = micro_steps,
                                                          .packing = Packing::best_fit,
                                                          .max_documents = 8,
                                                          .seed = 5,
                                                          .within = true,
                                                          .rank = rank,
                                                          .world = world,
                                                          .first_sequence = 250});
  };
  const auto one = loader_of(0, 1, 2), first = loader_of(0, 2, 1), second = loader_of(1, 2, 1);
  for (int step = 0; step < 5; ++step)
    for (Loader* rank : {first.get(), second.get()}) {
      const Batch a = one->next(), b = rank->next();
      CHECK(a.tokens == b.tokens);
      CHECK(a.targets == b.targets);
      CHECK(a.bounds == b.bounds);
      CHECK(a.step_targets == b.step_targets);
    }
}
