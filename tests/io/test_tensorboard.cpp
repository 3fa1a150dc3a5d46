// TensorBoard's event files: known bytes, and what readers find in a run's files. read_events.py follows only the
// format's description. TensorBoard's own reader is used too, if it is installed.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <limits>
#include <set>
#include <sstream>

#include "io/json_config.h"
#include "io/tensorboard.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

std::string hex(const std::string& bytes) {
  std::string out;
  for (const char c : bytes) out += fmt::format("{:02x}", static_cast<uint8_t>(c));
  return out;
}

bool require_python() { return run_command("python3 -c 'import struct'").exit_code == 0 || skip("no python3"); }

Json read_events(const std::string& folder) {
  const Outcome outcome = run_command("python3 " TRIAD_SOURCE_DIR "/tests/io/read_events.py " + folder);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return parse_json(outcome.standard_output, "read_events.py");
}

void run_tiny(const std::string& out, const std::string& more, const std::string& environment = "") {
  const Outcome outcome = run_program(
      "train " + kTiny + " --set runtime.device=cpu --set log.every=2 --set log.out_dir=" + out + " " + more,
      environment);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
}

std::vector<std::vector<double>> rows(const std::string& path) {  // rows in a numeric CSV table
  std::vector<std::vector<double>> out;
  std::istringstream in(read_text(path));
  std::string line;
  std::getline(in, line);
  while (std::getline(in, line)) {
    std::istringstream cells(line);
    out.emplace_back();
    for (std::string cell; std::getline(cells, cell, ',');) out.back().push_back(cell.empty() ? 0 : std::stod(cell));
  }
  return out;
}

}  // namespace

TEST_CASE("tensorboard: CRC-32C of the standard's examples", "[tensorboard]") {
  CHECK(crc32c("123456789") == 0xE3069283);
  CHECK(crc32c(std::string(32, '\0')) == 0x8A9136AA);
  CHECK(crc32c(std::string(32, '\xff')) == 0x62A8AB43);
  CHECK(crc32c("") == 0);
}

TEST_CASE("tensorboard: two records have the known bytes", "[tensorboard]") {
  CHECK(hex(tensorboard::record(tensorboard::file_version(0))) ==
        "1800000000000000a37f4b220900000000000000001a0d627261696e2e4576656e743a32eedf28a3");
  const std::vector<Scalar> loss = {{"loss", 3.25}};
  CHECK(hex(tensorboard::record(tensorboard::scalars(1.5, 7, loss))) ==
        "1a00000000000000129bd82d09000000000000f83f10072a0d0a0b0a046c6f73731500005040eb12d848");
}

TEST_CASE("tensorboard: a finite number stays finite, however large", "[tensorboard]") {
  const double inf = std::numeric_limits<double>::infinity(), most = std::numeric_limits<float>::max();
  const auto written = [](double value) {  // the value's four bytes, which follow the tag "x", in hexadecimal
    const std::string message = hex(tensorboard::scalars(0, 1, std::vector<Scalar>{{"x", value}}));
    return message.substr(message.size() - 8);
  };
  CHECK(written(1e300) == "ffff7f7f");
  CHECK(written(-1e300) == "ffff7fff");
  CHECK(written(most) == "ffff7f7f");
  CHECK(written(inf) == "0000807f");
  CHECK(written(-inf) == "000080ff");
  CHECK(written(3.25) == "00005040");
}

TEST_CASE("tensorboard: a histogram counts each finite value once, between its limits", "[tensorboard]") {
  if (!require_python()) return;
  const TemporaryFolder folder;
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> values = {-3, -1e-13, 0, 0, 1e-13, 0.5, 0.5001, 1e30, inf, -inf, std::nan("")};
  EventFile file(folder.path(), -1);
  file.add(3, "values", values);
  file.add(int64_t{1} << 40, "none", {});
  const Json found = read_events(folder.path());
  const Json h = found["histograms"]["values"][0][1];
  CHECK(found["histograms"]["values"][0][0] == 3);
  CHECK(h["num"] == 8);
  CHECK(h["min"] == -3);
  CHECK(h["max"] == 1e30);
  CHECK(h["sum"].get<double>() == Approx(1e30));
  CHECK(h["squares"].get<double>() == Approx(1e60));
  const auto limits = h["limits"].get<std::vector<double>>(), counts = h["counts"].get<std::vector<double>>();
  // TensorBoard stores right limits only, so an empty first bucket gives the second's left limit.
  REQUIRE(counts.front() == 0);
  for (size_t i = 1; i < counts.size(); ++i) {
    double inside = 0;
    for (const double v : values) inside += std::isfinite(v) && v < limits[i] && v >= limits[i - 1];
    INFO("bucket [" << limits[i - 1] << ", " << limits[i] << ")");
    CHECK(counts[i] == inside);
  }
  CHECK(found["histograms"]["none"][0][0] == int64_t{1} << 40);
  CHECK(found["histograms"]["none"][0][1]["num"] == 0);
}

TEST_CASE("tensorboard: a new file sorts after all earlier ones, whatever the clock says", "[tensorboard]") {
  // Another host's clock that is ahead; the last ten-digit time; a name without a number; the same second.
  for (const std::string earlier : {"4102444800.zz.9999999.7", "9999999999.host.1.0", "zzz", ""}) {
    INFO(earlier);
    const TemporaryFolder folder;
    const auto newest = [&] {
      std::string last;
      for (const fs::directory_entry& entry : fs::directory_iterator(folder.path()))
        last = std::max(last, entry.path().filename().string());
      return last;
    };
    if (!earlier.empty()) write_text(folder.file("events.out.tfevents." + earlier), "");
    for (size_t n = earlier.empty() ? 0 : 1; n < 12; ++n) {
      const std::string before = newest();
      const EventFile file(folder.path(), n == 0 ? -1 : 3);
      CHECK(count_files(folder.path()) == n + 1);
      CHECK(newest() > before);
      CHECK(read_text(folder.file(newest())).find(kEventWriter) != std::string::npos);
    }
  }
}

TEST_CASE("tensorboard: a run's events are the rows of its tables, and a resume replaces repeated steps",
          "[tensorboard]") {
  if (!require_python()) return;
  const TemporaryFolder folder;
  run_tiny(folder.path(), "--set train.save_every=10 --set train.eval_every=10");
  Json found = read_events(folder.file("tb"));
  const auto training = rows(folder.file("training.csv")), validation = rows(folder.file("val.csv"));
  REQUIRE(training.size() == 10);
  const auto same = [&](const char* tag, const std::vector<std::vector<double>>& table, size_t column,
                        double rounded = 0) {  // rounded: largest rounding error in the table's numbers
    const Json& series = found["scalars"][tag];
    REQUIRE(series.size() == table.size());
    for (size_t i = 0; i < table.size(); ++i) {
      INFO(tag << " " << i);
      CHECK(series[i][0].get<double>() == table[i][0]);
      CHECK(series[i][1].get<double>() == Approx(table[i][column]).epsilon(1e-4).margin(rounded));
    }
  };
  same("train/loss", training, 1);
  same("train/lr", training, 2);
  same("train/tokens_per_s", training, 3, 0.06);
  same("train/norm", training, 4);
  same("train/step_ms", training, 5, 6e-4);
  same("val/loss", validation, 1);
  same("val/perplexity", validation, 2);
  for (const char* tag : {"watch_memory/tensors_mib", "watch_memory/reserved_mib", "watch_memory/in_use_mib"})
    CHECK(found["scalars"][tag].size() == 10);
  for (const char* tag : {"train/steps_loss", "train/steps_norm"}) {
    REQUIRE(found["histograms"][tag].size() == 10);
    // The option log.every is 2, so each histogram counts two steps.
    for (const Json& h : found["histograms"][tag]) CHECK(h[1]["num"] == 2);
  }
  CHECK(found["restarts"].empty());
  // TensorBoard sorts the cards of all runs by tag, and opens the first two groups.
  std::set<std::string> tags, groups;
  for (const char* kind : {"scalars", "histograms"})
    for (const auto& [tag, series] : found[kind].items()) {
      tags.insert(tag);
      groups.insert(tag.substr(0, tag.find('/')));
    }
  CHECK(*tags.begin() == "train/loss");
  CHECK(*std::next(groups.begin()) == "val");
  CHECK(groups.size() > 2);
  // One folder with events is one run.
  CHECK(count_files(folder.file("tb")) == 1);
  // The config is written as text and as hparams.
  CHECK(found["texts"]["config"][0][0] == 0);
  CHECK(has(found["texts"]["config"][0][1].get<std::string>(), "        \"seq_len\": 48,\n"));
  CHECK(found["hparams"]["train.seq_len"] == 48);
  CHECK(found["hparams"]["train.lr"] == 1e-3);
  CHECK(found["hparams"]["model.attention"] == "nsa");
  CHECK(found["hparams"]["model.tie_embeddings"] == false);
  CHECK(found["ended"] == 1);

  run_tiny(folder.path(), "--overwrite --resume " + folder.file("checkpoints/step_10"));
  CHECK(count_files(folder.file("tb")) == 2);
  found = read_events(folder.file("tb"));
  CHECK(found["restarts"] == Json::array({11}));
  CHECK(found["scalars"]["train/loss"].size() == 15);

  run_tiny(folder.path(), "--overwrite --resume " + folder.file("checkpoints/step_10"), "NSA_TB_DISABLE=1");
  found = read_events(folder.file("tb"));
  // The first resume is resumed again, so its later steps are replaced, too.
  CHECK(found["restarts"] == Json::array({11, 11}));
  CHECK(found["scalars"]["train/loss"].size() == 15);

  run_tiny(folder.path(), "--overwrite", "NSA_TB_DISABLE=1");
  CHECK(!fs::exists(folder.file("tb")));
}

TEST_CASE("tensorboard: TensorBoard's own reader finds every scalar and histogram", "[tensorboard]") {
  if (run_command("python3 -c 'import tensorboard.backend.event_processing.event_accumulator'").exit_code != 0)
    return void(skip("no TensorBoard"));
  const TemporaryFolder folder;
  run_tiny(folder.path(), "--set train.save_every=10");
  run_tiny(folder.path(), "--overwrite --resume " + folder.file("checkpoints/step_10"));
  write_text(folder.file("check.py"), R"(
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
ours = json.loads(sys.argv[2])
def read(folder):
    read = EventAccumulator(folder, size_guidance={'scalars': 0, 'histograms': 0, 'tensors': 0})
    read.Reload()
    return read
theirs = read(sys.argv[1])
assert sorted(theirs.Tags()['scalars']) == sorted(ours['scalars']), theirs.Tags()
assert sorted(theirs.Tags()['histograms']) == sorted(ours['histograms']), theirs.Tags()
for tag in ours['scalars']:  # each step once: of the run before, steps past the resume are gone
    assert [e.step for e in theirs.Scalars(tag)] == list(range(2, 21, 2)), tag
    assert {(e.step, e.value) for e in theirs.Scalars(tag)} <= {tuple(e) for e in ours['scalars'][tag]}
for tag in ours['histograms']:
    assert [e.step for e in theirs.Histograms(tag)] == list(range(2, 21, 2)), tag
    for e, (step, h) in zip(theirs.Histograms(tag), ours['histograms'][tag]):
        v = e.histogram_value
        assert (v.num, v.bucket_limit, v.bucket) == (h['num'], h['limits'], h['counts'])
assert [e.step for e in theirs.Tensors('config')] == [0, 10]
assert b'"seq_len": 48' in theirs.Tensors('config')[0].tensor_proto.string_val[0]
assert theirs.SummaryMetadata('config').plugin_data.plugin_name == 'text'
def hparams(tag):
    assert theirs.SummaryMetadata(tag).plugin_data.plugin_name == 'hparams'
    return theirs.SummaryMetadata(tag).plugin_data.content
start = metadata.parse_session_start_info_plugin_data(hparams('_hparams_/session_start_info')).hparams
assert start['train.lr'].number_value == 1e-3 and start['model.attention'].string_value == 'nsa', start
assert start['model.tie_embeddings'].WhichOneof('kind') == 'bool_value'
assert metadata.parse_session_end_info_plugin_data(hparams('_hparams_/session_end_info')).status == 1
)");
  const Json found = read_events(folder.file("tb"));
  write_text(folder.file("found.json"), found.dump());
  const Outcome outcome = run_command("python3 " + folder.file("check.py") + " " + folder.file("tb") + " \"$(cat " +
                                      folder.file("found.json") + ")\"");
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
}
