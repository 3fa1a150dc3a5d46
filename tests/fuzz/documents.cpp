// Fuzzes reading packed documents' bounds (train/document_bounds.h) and the tables that they become
// (nsa/document_tables.h).
#include <algorithm>
#include <functional>

#include "kernels/nsa/document_bounds.h"
#include "kernels/nsa/document_tables.h"
#include "tests/fuzz/contract.h"
#include "train/document_bounds.h"

namespace triad::fuzz {

namespace {

constexpr int64_t kMostTokens = 4096;

// check_bounds's rule, in other words.
bool obeys_rule(const std::vector<int32_t>& bounds, int64_t B, int64_t T, int64_t most) {
  if (bounds.empty() || bounds.front() != 0 || bounds.back() != B * T) return false;
  if (std::ranges::adjacent_find(bounds, std::greater_equal<>()) != bounds.end()) return false;
  for (int64_t row = 0; row < B; ++row) {
    const auto first = std::ranges::find(bounds, row * T), last = std::ranges::find(bounds, (row + 1) * T);
    if (first == bounds.end() || last == bounds.end() || last - first > most) return false;
  }
  return bounds.size() > 1;
}

// Fills the tables for B rows and checks each token's entries.
void check_tables(const std::vector<int32_t>& bounds, int64_t B, int64_t T, int64_t l_sel) {
  const auto n = static_cast<int64_t>(bounds.size());
  const int64_t ids = block_ids(T, l_sel, n - 1);
  std::vector<int32_t> begin(static_cast<size_t>(B * T)), end = begin, first_block = begin;
  std::vector<int32_t> block_begin(static_cast<size_t>(B * ids), static_cast<int32_t>(T));
  const DocumentTableWriter writer{
      begin.data(), end.data(), first_block.data(), block_begin.data(), bounds.data(), n, T, ids, l_sel};
  for (int64_t token = 0; token < B * T; ++token) writer.write(token);
  for (int64_t b = 0; b < B; ++b) {
    const DocumentRow<int64_t> row{&begin[static_cast<size_t>(b * T)], &end[static_cast<size_t>(b * T)],
                                   &first_block[static_cast<size_t>(b * T)], &block_begin[static_cast<size_t>(b * ids)],
                                   T};
    for (int64_t t = 0; t < T; ++t) {
      const int64_t id = row.block_of(t, l_sel), from = row.begin(t), to = row.end(t);
      expect(from <= t && t < to && from == row.begin(from) && to == row.end(from),
             "token {} of row {} is in the document [{}, {})", t, b, from, to);
      expect(id >= 0 && id < ids && row.block_begin(id, l_sel) <= t && t < row.block_end(id, l_sel),
             "token {} of row {} is in block {} of {} ids", t, b, id, ids);
      expect(t == 0 || id == row.block_of(t - 1, l_sel) || id > row.block_of(t - 1, l_sel),
             "the block ids of row {} do not ascend at token {}", b, t);
    }
  }
}

void check_rows(const std::vector<int32_t>& bounds, int64_t B, int64_t T) {
  const auto n = static_cast<int64_t>(bounds.size());
  for (const int64_t most : {n, int64_t{2}, int64_t{1}}) {
    const bool accepted = accepts("documents: row ", [&] { check_bounds(bounds, B, T, most); });
    expect(accepted == obeys_rule(bounds, B, T, most), "{} bounds of {} rows of {} tokens, at most {} in a row: {}", n,
           B, T, most, accepted ? "accepted" : "refused");
  }
  if (!obeys_rule(bounds, B, T, n)) return;
  for (const int64_t l_sel : {1, 8, 64}) check_tables(bounds, B, T, l_sel);
}

}  // namespace

void read_documents(std::string_view bytes) {
  const std::string path = scratch_file("documents.i32", bytes);
  std::vector<int32_t> bounds(bytes.size() / sizeof(int32_t));
  bytes.copy(reinterpret_cast<char*>(bounds.data()), bounds.size() * sizeof(int32_t));
  const int64_t last = bounds.empty() ? 0 : bounds.back();
  for (const int64_t T : {std::clamp<int64_t>(last, 1, kMostTokens), int64_t{64}}) {
    const auto read = read_or_refuse(path, [&] { return read_document_bounds(path, T); });
    expect(read.has_value() == (bytes.size() % sizeof(int32_t) == 0 && obeys_rule(bounds, 1, T, T)),
           "{}: {} bounds of a row of {} tokens are {}", path, bounds.size(), T, read ? "accepted" : "refused");
    if (read) expect(*read == bounds, "{}: other bounds than the file's", path);
    check_rows(bounds, 1, T);
    if (T % 2 == 0) check_rows(bounds, 2, T / 2);
  }
}

}  // namespace triad::fuzz
