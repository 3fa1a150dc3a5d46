#include "train/run/row_documents.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "io/data/best_fit.h"
#include "io/data/documents.h"
#include "kernels/common/integer.h"
#include "train/monitor/banner.h"

namespace triad {

namespace {

// What a component's rows hold of documents in an epoch.
struct ComponentRows {
  int64_t rows = 0;
  int64_t most = 0;  // documents in a row
  DocumentMix parts = {}, attended = {};
  double per_row = 0;                              // documents in a row
  double cut = 0;                                  // share of the documents that are cut
  double cut_tokens = 0, dropped = 0, padded = 0;  // shares of the tokens: RowDocuments::cut, dropped, padded
};

// Throws a UsageError if a source's documents are not known.
const DocumentIndex& known_documents(const Config& c, const TokenSource& source) {
  if (source.documents() != nullptr) return *source.documents();
  const bool within = c.data.documents == DocumentScope::attend_within;
  const char* const key = within ? "data.documents is attend_within" : "data.packing is best_fit";
  const char* const remedy = within ? "data.documents=attend_across" : "data.packing=stream";
  if (c.data.kind != DataKind::shards)
    fail_usage("{}, but data of kind {} ({}) has no documents. Set {}", key, word_of(c.data.kind), source.name(),
               remedy);
  fail_usage(
      "{}, but where the documents of {} begin is not known: no manifest.json lists all of its shards and names their "
      "separator as `eot`. Write the shards with triad data, or write that file (io/data/README.md). Or set {}",
      key, source.name(), remedy);
}

// The most documents in a row of T consecutive source tokens. limit: throws a UsageError that names the row if there
// are more; 0: none.
RowDivision divide_stream(const Config& c, const TokenSource& source, int64_t T, int64_t limit) {
  const RowDivision division = divide_rows(known_documents(c, source), (source.size() - 1) / T, T);
  if (limit > 0 && division.most > limit)
    fail_usage("{}: row {} (tokens {} to {}) has {} documents, data.max_documents allows {}", source.name(),
               division.fullest, division.fullest * T, (division.fullest + 1) * T, division.most, limit);
  return division;
}

// The documents in `rows` rows, from their numbers by length.
DocumentMix mix_of(int64_t rows, const std::vector<int64_t>& by_length) {
  DocumentMix mix{.rows = rows, .documents = {}};
  for (size_t length = 0; length < by_length.size(); ++length)
    if (by_length[length] > 0) mix.add(static_cast<int64_t>(length), by_length[length]);
  return mix;
}

// The documents in a mixture's rows: those of the components' epochs, repeated so often that their rows have the
// shares.
DocumentMix mix_components(const Mixture& data, const std::vector<DocumentMix>& components) {
  if (components.size() == 1) return components.front();
  // As many rows as leave the component whose epochs are rarest one of them.
  double rows = 0;
  for (size_t i = 0; i < components.size(); ++i)
    rows = std::max(rows, static_cast<double>(components[i].rows) / data.share(i));
  constexpr double kMostRows = 1e12;
  rows = std::min(rows, kMostRows);
  DocumentMix mix;
  for (size_t i = 0; i < components.size(); ++i) {
    const double epochs = rows * data.share(i) / static_cast<double>(std::max<int64_t>(1, components[i].rows));
    mix.rows += std::llround(epochs * static_cast<double>(components[i].rows));
    for (const auto& [length, number] : components[i].documents)
      mix.add(length, std::max<int64_t>(1, std::llround(epochs * static_cast<double>(number))));
  }
  return mix;
}

// Calls value(component) and returns the mean over the mixture's rows.
template <class F>
double mean_over_rows(const Mixture& data, const std::vector<ComponentRows>& components, F&& value) {
  double mean = 0;
  for (size_t i = 0; i < components.size(); ++i) mean += data.share(i) * value(components[i]);
  return mean;
}

ComponentRows measure_packed(const DataSource& data, const TokenSource& source) {
  const PackingStats s = measure_best_fit(source, data.rows);
  const DocumentIndex& index = require_documents(source);
  ComponentRows rows{.rows = s.rows,
                     .parts = mix_of(s.rows, s.parts),
                     .attended = {},
                     .per_row = ratio(s.pieces, s.rows),
                     .cut = ratio(s.cut, index.count()),
                     .cut_tokens = ratio(s.cut_tokens, index.size),
                     .dropped = ratio(s.dropped, index.size),
                     .padded = ratio(s.padded, s.rows * data.rows.seq_len)};
  if (!data.rows.within) return rows;
  rows.attended = rows.parts;
  for (const auto& [length, number] : mix_of(s.rows, s.paddings).documents) rows.attended.add(length, number);
  return rows;
}

ComponentRows measure_stream(const Config& c, const TokenSource& source) {
  const int64_t T = c.train.longest_seq_len();
  const RowDivision division = divide_stream(c, source, T, std::max<int64_t>(0, c.data.max_documents));
  const int64_t rows = (source.size() - 1) / T;
  const DocumentMix parts = mix_of(rows, division.parts);
  return {.rows = rows,
          .most = division.most,
          .parts = parts,
          .attended = parts,
          .per_row = ratio(division.documents, rows),
          .cut = ratio(division.cut, source.documents()->count()),
          .cut_tokens = ratio(division.cut_tokens, rows * T)};
}

// How many documents fill a row of T tokens if they are short: all but the shortest twentieth are longer.
int64_t documents_that_fill(const Mixture& data, int64_t T) {
  int64_t most = default_max_documents(T);
  for (const auto& source : data.sources()) {
    const DocumentIndex& index = *source->documents();
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < index.count(); ++i) lengths.push_back(index.length(i));
    constexpr size_t kPart = 20;
    const auto shortest = lengths.begin() + static_cast<std::ptrdiff_t>(lengths.size() / kPart);
    std::nth_element(lengths.begin(), shortest, lengths.end());
    most = std::max(most, ceil_div(T, std::max<int64_t>(1, *shortest)));
  }
  return std::min(most, T);
}

}  // namespace

double ratio(int64_t a, int64_t b) { return b > 0 ? static_cast<double>(a) / static_cast<double>(b) : 0; }

std::string percent(double ratio) { return fmt::format("{:.2f}%", 100 * ratio); }

void check_max_documents(const Config& c) {
  if (c.data.max_documents > 0 && !attends_within(c.data) && packing_of(c) == Packing::stream)
    fail_usage(
        "data.max_documents is {}, but with data.packing stream it limits only rows whose attention stays within "
        "documents, and here it crosses them (data.documents attend_across). Set data.max_documents=0, "
        "data.documents=attend_within or data.packing=best_fit",
        c.data.max_documents);
}

void describe_documents(const Config& c, DataSource& data) {
  const int64_t longest = c.train.longest_seq_len();
  data.rows = {.seq_len = longest,
               .packing = packing_of(c),
               .max_documents = std::max<int64_t>(0, c.data.max_documents),
               .seed = static_cast<uint64_t>(c.data.seed),
               .within = attends_within(c.data)};
  const bool packs = data.rows.packing == Packing::best_fit, within = data.rows.within;
  if (!within && !packs) {
    for (const auto& source : data.train.sources()) data.epoch_rows.push_back(count_sequences(*source, longest));
    return;
  }
  int64_t documents = 0;
  for (const auto& source : data.train.sources()) documents += known_documents(c, *source).count();
  const bool follows = c.data.max_documents == kFollowsData || c.data.packing == Packing::unset;
  if (packs && c.data.max_documents <= 0)
    data.rows.max_documents = follows ? documents_that_fill(data.train, longest) : default_max_documents(longest);
  // Validation rows are consecutive tokens for either packing, and have their stage's length. Short rows lie within the
  // long ones except those after the last long one.
  const int64_t limit = packs ? 0 : std::max<int64_t>(0, c.data.max_documents);
  int64_t most = 0;
  std::set<int64_t> lengths;
  for (const TrainStage& stage : stages_of(c.train)) lengths.insert(stage.seq_len);
  for (const auto& source : data.val.sources())
    if (within && source->size() > 0)
      for (const int64_t T : lengths) most = std::max(most, divide_stream(c, *source, T, limit).most);
  std::vector<ComponentRows> components;
  std::vector<DocumentMix> parts, attended;
  int64_t fullest = 0;
  for (const auto& source : data.train.sources()) {
    components.push_back(packs ? measure_packed(data, *source) : measure_stream(c, *source));
    const ComponentRows& rows = components.back();
    data.epoch_rows.push_back(rows.rows);
    parts.push_back(rows.parts);
    attended.push_back(rows.attended);
    fullest = std::max(fullest, rows.most);
  }
  data.parts = mix_components(data.train, parts);
  data.attended = mix_components(data.train, attended);
  if (packs && within) data.most_documents = std::max(data.rows.max_documents + 1, most);
  if (!packs) data.most_documents = limit > 0 ? limit : std::max(fullest, most);

  const auto mean = [&](double ComponentRows::*value) {
    return mean_over_rows(data.train, components, [&](const ComponentRows& rows) { return rows.*value; });
  };
  const double length = ratio(data.train.size(), documents), per_row = mean(&ComponentRows::per_row),
               cut = mean(&ComponentRows::cut), cut_tokens = mean(&ComponentRows::cut_tokens),
               dropped = mean(&ComponentRows::dropped), padded = mean(&ComponentRows::padded);
  data.document_stats = {{"documents", documents},     {"mean_length", length},   {"documents_per_row", per_row},
                         {"documents_cut_share", cut}, {"cut_share", cut_tokens}, {"dropped_share", dropped},
                         {"padded_share", padded}};
  data.documents = fmt::format("{} of {:.0f} tokens on average; attention {} them; ", grouped(documents), length,
                               within ? "stays within" : "crosses");
  if (packs)
    data.documents += fmt::format(
        "best_fit: {:.1f} a row, {} cut to fill a row, which drops {} of the tokens; {} of the tokens are cut from "
        "their document's beginning or dropped, {} of the rows' tokens are padding",
        per_row, percent(cut), percent(dropped), percent(cut_tokens), percent(padded));
  else
    data.documents += fmt::format(
        "stream: {:.1f} a row, at most {}; rows' ends cut {} of them, and so {} of the tokens from their document's "
        "beginning",
        per_row, fullest, percent(cut), percent(cut_tokens));
}

DocumentMix attended_in(const DataSource& data, const TrainStage& stage) {
  const int64_t T = stage.seq_len;
  if (!data.within() || T == data.rows.seq_len) return data.attended;
  std::vector<DocumentMix> attended;
  for (const auto& source : data.train.sources()) {
    const int64_t rows = (source->size() - 1) / T;
    attended.push_back(mix_of(rows, divide_rows(*source->documents(), rows, T).parts));
  }
  return mix_components(data.train, attended);
}

}  // namespace triad
