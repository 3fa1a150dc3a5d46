// What a run records about its documents: shares of cut and padded tokens, lengths, packed rows' selection, and FLOPs
// that count attention within documents.
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <numeric>
#include <vector>

#include "io/data/loader.h"
#include "io/file.h"
#include "io/json_config.h"
#include "model/flops.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/config/load_config.h"
#include "train/inference.h"
#include "train/monitor/document_lengths.h"
#include "train/monitor/pace.h"
#include "train/monitor/selection_sample.h"
#include "train/run/data_source.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// Writes JSONL with 300 documents, 1 to 60 bytes each, and returns options that train on it.
std::string write_documents(const TemporaryFolder& folder) {
  std::string text;
  for (int i = 0; i < 300; ++i)
    text += fmt::format("{{\"text\":\"{}\"}}\n", std::string(1 + i * i % 60, static_cast<char>('a' + i % 26)));
  write_text(folder.file("a.jsonl"), text);
  return "--set data.kind=text --set data.paths=" + folder.file("a.jsonl") + " ";
}
const std::string kWithin = "--set data.documents=attend_within ", kPacked = "--set data.packing=best_fit ";

Config run_config(const std::string& run_folder) { return config_from_json(json_of(run_folder + "/config.json")); }

int64_t sum_of(const Json& ranges, const char* key) {
  int64_t sum = 0;
  for (const Json& range : ranges) sum += range[key].get<int64_t>();
  return sum;
}

}  // namespace

TEST_CASE("documents: lengths are counted by powers of two", "[train][documents]") {
  const DocumentIndex index{.begins = {0, 1, 3, 6, 10, 17, 25}, .size = 325};
  const Json lengths = document_lengths({&index}, {.rows = 2, .documents = {{3, 4}, {16, 1}}});
  CHECK(lengths["schema"] == 1);
  CHECK(lengths["documents"] == 7);
  CHECK(lengths["tokens"] == 325);
  CHECK(lengths["longest"] == 300);
  const auto range = [](int64_t from, int64_t documents, int64_t tokens) {
    return Json{{"from", from}, {"to", 2 * from}, {"documents", documents}, {"tokens", tokens}};
  };
  CHECK(lengths["lengths"] ==
        Json::array({range(1, 1, 1), range(2, 2, 5), range(4, 2, 11), range(8, 1, 8), range(16, 0, 0), range(32, 0, 0),
                     range(64, 0, 0), range(128, 0, 0), range(256, 1, 300)}));
  CHECK(lengths["row_parts"] == Json::array({range(2, 4, 12), range(4, 0, 0), range(8, 0, 0), range(16, 1, 16)}));
  CHECK(document_lengths({&index}, {})["row_parts"].is_null());
}

TEST_CASE("documents: a run records shares of tokens, lengths and each step's documents", "[train][documents]") {
  const TemporaryFolder folder;
  const std::string data = write_documents(folder);
  for (const bool packed : {false, true}) {
    const std::string out = run(folder.file(packed ? "packed" : "stream"), 1,
                                data + kWithin + (packed ? kPacked : "") + "--set data.max_documents=12 ");
    const Config config = run_config(out);
    const DataSource source = open_data(config);
    const Json stats = json_of(out + "/metrics.json")["documents"];
    CHECK(stats == heartbeats(out, 0, "boot").at(0)["documents"]);
    CHECK(stats["cut_share"].get<double>() > 0.01);
    CHECK(stats["cut_share"].get<double>() < 0.6);
    CHECK((stats["padded_share"].get<double>() > 0) == packed);
    CHECK((stats["dropped_share"].get<double>() > 0) == packed);
    CHECK(stats["documents_cut_share"] != stats["cut_share"]);
    const std::string banner = read_text(out + "/ranks/rank_0.log");
    CHECK(banner.find(fmt::format("{:.2f}% of the tokens", 100 * stats["cut_share"].get<double>())) !=
          std::string::npos);

    // Steps: counts over the rows that the loader read.
    const auto beats = heartbeats(out, 0, "step_end");
    REQUIRE(beats.size() == 20);
    Loader loader(source.train, {.seq_len = 48,
                                 .micro_batch = 2,
                                 .micro_steps = config.train.accumulate_grad_batches,
                                 .packing = config.data.packing,
                                 .max_documents = 12,
                                 .seed = static_cast<uint64_t>(config.data.seed),
                                 .within = true});
    const double rows = 2.0 * static_cast<double>(config.train.accumulate_grad_batches);
    for (const Json& beat : beats) {
      RowDocuments sum;
      for (int64_t i = 0; i < config.train.accumulate_grad_batches; ++i) sum.add(loader.next().documents);
      CHECK(beat["docs_per_row"] == static_cast<double>(sum.documents) / rows);
      CHECK(beat["docs_cut_share"] == static_cast<double>(sum.cut) / (48 * rows));
      CHECK(beat["docs_padded_share"] == static_cast<double>(sum.padded) / (48 * rows));
    }
    const Json lengths = json_of(out + "/document_lengths.json");
    CHECK(lengths["documents"] == stats["documents"]);
    CHECK(sum_of(lengths["lengths"], "documents") == stats["documents"].get<int64_t>());
    CHECK(sum_of(lengths["lengths"], "tokens") == source.train.size());
    const int64_t parts = sum_of(lengths["row_parts"], "documents"), tokens = sum_of(lengths["row_parts"], "tokens");
    CHECK(static_cast<double>(parts) / static_cast<double>(source.parts.rows) ==
          Approx(stats["documents_per_row"].get<double>()));
    CHECK(static_cast<double>(tokens) / static_cast<double>(48 * source.parts.rows) ==
          Approx(1 - stats["padded_share"].get<double>()));
  }
  // Where rows do not depend on documents, only their lengths are recorded; a new run in the folder removes them.
  const std::string across = run(folder.file("across"), 1, data + "--set data.documents=attend_across ");
  CHECK(json_of(across + "/document_lengths.json")["row_parts"].is_null());
  CHECK_FALSE(json_of(across + "/metrics.json").contains("documents"));
  CHECK_FALSE(heartbeats(across, 0, "step_end").at(0).contains("docs_per_row"));
  run(across, 1, "--overwrite ");
  CHECK_FALSE(fs::exists(across + "/document_lengths.json"));
}

TEST_CASE("documents: MFU, the banner and plan count attention within documents", "[train][documents]") {
  const TemporaryFolder folder;
  const std::string data = write_documents(folder);
  const std::string plan_of = "plan " + kTiny + " --json --set runtime.device=cpu " + data;
  const auto planned = [&](const std::string& more) {
    const Outcome outcome = run_program(plan_of + more);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return parse_json(outcome.standard_output, "plan");
  };
  const double whole = planned("--set data.documents=attend_across")["flops_per_token"];
  for (const bool packed : {false, true}) {
    const std::string sets = kWithin + (packed ? kPacked : "");
    const Config config = run_config(run(folder.file(packed ? "packed" : "stream"), 1, data + sets));
    const DataSource source = open_data(config);
    // The mix against an epoch's rows.
    const auto rows = make_rows(source.train, source.rows);
    DocumentMix counted{.rows = source.attended.rows, .documents = {}};
    std::vector<int32_t> tokens(48), targets(48);
    for (int64_t i = 0; i < counted.rows; ++i) {
      Row row{tokens, targets};
      rows->read(i, row);
      row.begins.push_back(48);
      for (size_t j = 0; j + 1 < row.begins.size(); ++j) counted.add(row.begins[j + 1] - row.begins[j]);
    }
    CHECK(source.attended.documents == counted.documents);
    const int64_t sequences = config.train.micro_batch_size * config.train.accumulate_grad_batches;
    const double want = training_flops(config.model, sequences, 48, config.recompute, counted);
    CHECK(step_flops(config, source.attended) == want);
    CHECK(want < step_flops(config));
    const Json plan = planned(sets);
    CHECK(plan["flops_per_token"].get<double>() == Approx(want / static_cast<double>(sequences * 48)));
    CHECK(plan["flops_per_token"].get<double>() < whole);
    CHECK(plan["flops_are_a_bound"] == false);
    const std::string log = read_text(folder.file(packed ? "packed" : "stream") + "/ranks/rank_0.log");
    CHECK(log.find(fmt::format("({:.3g} MFLOP a step)", want * 1e-6)) != std::string::npos);

    ThroughputMeter meter(config, want, 1e12, 0);
    StepRecord record{.step = 1, .tokens = sequences * 48, .step_ms = 50};
    meter.measure(record, std::chrono::steady_clock::now());
    CHECK(record.mfu == Approx(want / 0.05 / 1e12));
    // The time left follows the FLOPs left: the stage's last step, and a later stage with ten such steps.
    const auto now = std::chrono::steady_clock::now();
    record.step = 2;
    meter.measure(record, now + std::chrono::seconds(1));
    meter.stage(4 * want, /*end=*/4, /*later_flops=*/40 * want);
    record.step = 3;
    meter.measure(record, now + std::chrono::seconds(5));
    CHECK(record.eta_s == Approx(4 + 40).epsilon(0.01));
  }
  // A document count in the config is enough to plan memory, without the data; FLOPs are then a bound.
  fs::remove(folder.file("a.jsonl"));
  const Json bound = planned(kWithin + "--set data.max_documents=9");
  CHECK(bound["flops_are_a_bound"] == true);
  CHECK(bound["flops_per_token"] == whole);
  const Outcome text =
      run_program("plan " + kTiny + " --set runtime.device=cpu " + data + kWithin + "--set data.max_documents=9");
  CHECK(text.output.find("FLOPs: at most") != std::string::npos);
  CHECK(text.output.find("each row counts as one document") != std::string::npos);
}

TEST_CASE("documents: a selection sample of packed rows has the bounds, and blocks counted from each document",
          "[train][documents]") {
  const TemporaryFolder folder;
  const std::string out =
      run(folder.file("run"), 1, write_documents(folder) + kWithin + "--set train.eval_every=20 --set train.steps=20 ");
  const Config config = run_config(out);
  const DataSource source = open_data(config);
  const int64_t B = config.train.micro_batch_size;
  const Batch batch = validation_batch(source.val, 48, B, 0, true);
  LoadedModel loaded({.checkpoint = out,
                      .device = Device::cpu(),
                      .batch = B,
                      .training = true,
                      .most_documents = source.most_documents});
  loaded.set_documents(batch.bounds);
  loaded.set_tokens(batch.tokens);
  loaded.model().forward(loaded.ctx(), loaded.activations());
  const Json sample = json_of(out + "/selection_sample.json");
  CHECK(sample["schema"] == 3);
  const auto bounds = sample["bounds"].get<std::vector<int32_t>>();
  REQUIRE(bounds.size() > 2);
  CHECK(bounds.back() == 48);
  CHECK(std::equal(bounds.begin(), bounds.end(), batch.bounds.begin()));
  bool shifted = false;
  for (size_t layer = 0; layer < 2; ++layer)
    for (size_t group = 0; group < 2; ++group)
      for (size_t t = 0; t < 48; ++t) {
        const auto after = std::upper_bound(bounds.begin(), bounds.end(), static_cast<int32_t>(t));
        const int32_t begin = *std::prev(after), own = (static_cast<int32_t>(t) - begin) / 8;
        // Each document before it begins a new block.
        const int32_t first = begin / 8 + static_cast<int32_t>(after - bounds.begin() - 1);
        const Tensor row = loaded.activations()
                               .layer(static_cast<int64_t>(layer))
                               .attention.nsa.block_index[0][static_cast<int64_t>(t)][static_cast<int64_t>(group)];
        std::vector<int32_t> known;
        for (int64_t i = 0; i < 4 && row.ptr<int32_t>()[i] >= 0; ++i) known.push_back(row.ptr<int32_t>()[i] - first);
        const auto list = sample["lists"][layer][group][t].get<std::vector<int32_t>>();
        INFO("layer " << layer << ", group " << group << ", token " << t << " of the document at " << begin);
        CHECK(list == known);
        CHECK(list.front() == 0);
        CHECK(list.back() == own);
        shifted = shifted || first > 0;
      }
  CHECK(shifted);
}
