#include "io/data/documents.h"

#include <zlib.h>

#include <algorithm>
#include <utility>

namespace triad {

std::span<const int64_t> DocumentIndex::begins_in(int64_t begin, int64_t end) const {
  const auto first = std::lower_bound(begins.begin(), begins.end(), begin);
  return {first, std::lower_bound(first, begins.end(), end)};
}

DocumentIndex DocumentIndex::part(int64_t begin, int64_t end) const {
  DocumentIndex part{.begins = {0}, .size = end - begin, .separator = separator, .eot = eot};
  for (const int64_t at : begins_in(begin + 1, end)) part.begins.push_back(at - begin);
  if (end == size) part.after_end = after_end;
  return part;
}

uint32_t DocumentIndex::checksum() const {
  const auto* const bytes = reinterpret_cast<const Bytef*>(begins.data());
  return static_cast<uint32_t>(crc32_z(0, bytes, begins.size() * sizeof(int64_t)));
}

DocumentIndex index_documents(std::vector<int64_t> marks, int64_t size, Separator separator, int32_t eot) {
  DocumentIndex index{.begins = std::move(marks), .size = size, .separator = separator, .eot = eot};
  std::vector<int64_t>& begins = index.begins;
  if (separator == Separator::last) {
    for (int64_t& mark : begins) ++mark;
    if (!begins.empty() && begins.back() == size) begins.pop_back();
  } else {
    index.after_end = eot;
  }
  if (begins.empty() || begins.front() != 0) begins.insert(begins.begin(), 0);
  return index;
}

RowDivision divide_rows(const DocumentIndex& index, int64_t rows, int64_t seq_len) {
  RowDivision division{.parts = std::vector<int64_t>(static_cast<size_t>(seq_len + 1))};
  const auto add_row = [&](int64_t row, int64_t documents) {
    division.documents += documents;
    if (documents > division.most) division.most = documents, division.fullest = row;
  };
  int64_t row = 0, in_row = 0;
  const auto close_rows_before = [&](int64_t position) {  // document before `position` is in each of these rows
    for (; row < rows && (row + 1) * seq_len <= position; ++row, in_row = 1) add_row(row, in_row);
  };
  for (int64_t i = 0; i < index.count() && row < rows; ++i) {
    const int64_t begin = index.begins[i], end = index.end(i);
    close_rows_before(begin);
    if (row == rows) break;
    in_row = begin % seq_len == 0 ? 1 : in_row + 1;
    division.cut += end > (row + 1) * seq_len && (row + 1 < rows);
    for (int64_t at = begin, row_end = 0; at < std::min(end, rows * seq_len); at = row_end) {
      row_end = std::min(end, (at / seq_len + 1) * seq_len);
      ++division.parts[row_end - at];
      if (at > begin) division.cut_tokens += row_end - at;
    }
  }
  close_rows_before(rows * seq_len);
  return division;
}

}  // namespace triad
