#include "train/run/mixture_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "train/run/row_documents.h"

namespace triad {

std::string MixtureReport::text(int64_t last_cursor) {
  std::string text;
  for (const Json& component : table(last_cursor))
    text += fmt::format("{}{:.1f}% of the rows from {} ({:.2f} epochs)", text.empty() ? "; " : ", ",
                        100 * component["weight"].get<double>(), component["data"].get<std::string>(),
                        component["epochs"].get<double>());
  return text;
}

Json MixtureReport::drawn(int64_t cursor) {
  if (!any()) return Json::object();
  Json shares = Json::array(), epochs = Json::array();
  for (const Json& component : table(cursor)) {
    shares.push_back(component["share"]);
    epochs.push_back(component["epochs"]);
  }
  return {{"mix_shares", shares}, {"mix_epochs", epochs}};
}

Json MixtureReport::table(int64_t cursor) {
  Json components = Json::array();
  if (!any()) return components;
  // Rows as long as the longest: those are drawn.
  const int64_t rows = cursor / data_.rows.seq_len;
  const std::vector<int64_t> drawn = draws_.counts(rows);
  for (size_t i = 0; i < drawn.size(); ++i)
    components.push_back({{"data", data_.components[i]},
                          {"weight", data_.train.share(i)},
                          {"rows", drawn[i]},
                          {"share", ratio(drawn[i], rows)},
                          {"epochs", ratio(drawn[i], data_.epoch_rows[i])}});
  return components;
}

}  // namespace triad
