#include "engine/process/did_you_mean.h"

#include <algorithm>
#include <cctype>

namespace triad {

namespace {

std::string plain(std::string_view word) {
  std::string out(word);
  for (char& c : out) c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

}  // namespace

int edit_distance(std::string_view a, std::string_view b) {
  // Rows i - 2 (before), i - 1 (last) and i (row) of the distance table; a swap needs row i - 2.
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    before.swap(last);
    last.swap(row);
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known, std::string_view before) {
  constexpr size_t kLongestWord = 64, kLettersAnError = 3, kShortestBeginning = 3;
  if (typed.empty() || typed.size() > kLongestWord) return "";  // the cost grows with the square of the length
  const std::string word = plain(typed);
  const std::string* nearest = nullptr;
  int least = 0;
  for (const std::string& each : known) {
    const std::string candidate = plain(each);
    const size_t longer = std::max(word.size(), candidate.size());
    const int allowed = static_cast<int>(std::max<size_t>(1, longer / kLettersAnError));
    const bool begins = word.size() >= kShortestBeginning && candidate.starts_with(word);
    const int distance = edit_distance(word, candidate), rank = begins ? std::min(distance, allowed) : distance;
    // A word without any letter in common is not similar.
    if (rank > allowed || distance >= static_cast<int>(longer)) continue;
    if (nearest == nullptr || rank < least) nearest = &each, least = rank;
  }
  return nearest == nullptr ? "" : "; did you mean \"" + std::string(before) + *nearest + "\"?";
}

}  // namespace triad
