// Runs on mixtures (data.paths with objects): same bits as on one path, resumes, what is refused, what is reported; and
// the vocabulary that an absent model.vocab_size stands for.
#include <fmt/format.h>

#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "tests/support/checked_run.h"
#include "tests/support/corpus.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/config/load_config.h"
#include "train/run/data_source.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// Three corpora of short documents, as text and as shards.
class Corpora {
 public:
  Corpora() {
    for (const char letter : std::string("abc")) {
      std::string text;
      for (int i = 0; i < 300 + 100 * (letter - 'a'); ++i)
        text += Json{{"text", fmt::format("{} {}", i * i, std::string(static_cast<size_t>(1 + i * 37 % 80), letter))}}
                    .dump() +
                "\n";
      write_text(file(std::string(1, letter) + ".jsonl"), text);
    }
  }
  std::string file(const std::string& name) const { return folder_.file(name); }
  // Writes shards of a corpus, and returns their folder.
  std::string shards(const std::string& name) const {
    run_data("--input " + file(name + ".jsonl") + " --shard-tokens 5000 --val-fraction 0.2 --out " + file(name));
    return file(name);
  }
  // data.paths with objects: "a:0.7" is {path: a.jsonl, weight: 0.7}, "a:0.7:2" also has epochs, "a::2" only these.
  std::string mixture(const std::vector<std::string>& words) const {
    Json list = Json::array();
    for (const std::string& word : words) {
      Json object = {{"path", file(word.substr(0, 1) + ".jsonl")}};
      std::istringstream fields(word);
      std::string name, weight, epochs;
      std::getline(fields, name, ':');
      std::getline(fields, weight, ':');
      std::getline(fields, epochs);
      if (!weight.empty()) object["weight"] = Json::parse(weight);
      if (!epochs.empty()) object["epochs"] = Json::parse(epochs);
      list.push_back(object);
    }
    return paths(list.dump());
  }
  static std::string paths(const std::string& json, const std::string& kind = "text") {
    return "--set data.kind=" + kind + " --set 'data.paths=" + json + "' ";
  }

 private:
  TemporaryFolder folder_;
};

const std::string kPacked = "--set data.packing=best_fit --set data.max_documents=8 ";
const std::string kStages = R"(--set train.steps=null --set 'train.stages=[{"steps":7,"seq_len":24},{"steps":5}]' )";

std::vector<std::string> strings_of(const std::string& paths) {
  return {"data.kind=text", "data.paths=" + paths, "data.tokenizer=byte"};
}

}  // namespace

TEST_CASE("mixture: one component gives the bits of its path alone", "[train][mixture]") {
  const Corpora corpora;
  const std::string more = "--set train.steps=6 --set train.eval_every=3 ";
  const std::string a = corpora.file("a.jsonl"), plain = run(corpora.file("plain"), 1, corpora.paths(a) + more);
  int i = 0;
  for (const std::string& keys : {corpora.mixture({"a:5"}), corpora.mixture({"a"}), corpora.mixture({"a:2:9"}),
                                  corpora.paths("[\"" + a + "\"]"), corpora.paths(R"([{"path":[")" + a + "\"]}]")}) {
    INFO(keys);
    const std::string out = run(corpora.file(fmt::format("run{}", i++)), 1, keys + more);
    CHECK(same_file(out + kWeights, plain + kWeights));
    CHECK(same_file(out + "/val.csv", plain + "/val.csv"));
    CHECK_FALSE(heartbeats(out, 0, "step_end").at(0).contains("mix_shares"));
  }
}

TEST_CASE("mixture: a resume in the middle gives the same bits", "[train][mixture]") {
  const Corpora corpora;
  const std::string mixture = corpora.mixture({"a:0.5", "b:0.3", "c:0.2"});
  for (const std::string& more : {std::string("--set train.steps=12 "), "--set train.steps=12 " + kPacked, kStages}) {
    INFO(more);
    const std::string keys = mixture + more +
                             "--set train.save_every=1 --set train.keep_last=0 --set train.eval_every=4 "
                             "--set train.accumulate_grad_batches=4 --overwrite ";
    const std::string whole = corpora.file("whole");
    run_ok(train_args(whole, keys));
    for (const int step : {1, 5, 7}) {
      const std::string part = corpora.file("part");
      run_ok(train_args(part, keys + fmt::format("--resume {}/checkpoints/step_{}", whole, step)));
      CHECK(same_file(whole + kWeights, part + kWeights));
      CHECK(column(whole + "/val.csv", "val_loss").at(12) == column(part + "/val.csv", "val_loss").at(12));
      CHECK(heartbeats(whole, 0, "step_end").back()["mix_epochs"] ==
            heartbeats(part, 0, "step_end").back()["mix_epochs"]);
    }
  }
}

TEST_CASE("mixture: two and four ranks read the rows of one, and resume to the same bits", "[train][mixture]") {
  if (!require_mpirun()) return;
  const Corpora corpora;
  const std::string keys = corpora.mixture({"a:0.5", "b:0.3", "c:0.2"}) +
                           "--set train.steps=8 --set train.eval_every=8 --set train.save_every=3 "
                           "--set train.keep_last=0 ";
  const std::string one = run(corpora.file("one"), 1, keys);
  for (const int ranks : {2, 4}) {
    INFO(ranks << " ranks");
    const std::string whole = run(corpora.file(fmt::format("whole_{}", ranks)), ranks, keys);
    CHECK(difference(one + kWeights, whole + kWeights).all < 1e-5);
    CHECK(heartbeats(one, 0, "step_end").back()["mix_shares"] ==
          heartbeats(whole, ranks - 1, "step_end").back()["mix_shares"]);
    const std::string from = "--resume " + whole + "/checkpoints/step_3 ";
    const std::string part = run(corpora.file(fmt::format("part_{}", ranks)), ranks, keys + from);
    CHECK(same_file(whole + kWeights, part + kWeights));
  }
}

TEST_CASE("mixture: banner, heartbeats, metrics and report have shares and epochs", "[train][mixture]") {
  const Corpora corpora;
  const std::string out =
      run(corpora.file("run"), 1, corpora.mixture({"a:0.75", "b:0.25"}) + "--set train.steps=16 --set train.seed=5 ");
  const DataSource data = open_data(load_config(out + "/config.json", {}).config);
  const std::string a = corpora.file("a.jsonl"), b = corpora.file("b.jsonl");
  const int64_t rows = 16 * 8;
  const auto beats = heartbeats(out, 0, "step_end");
  REQUIRE(beats.size() == 16);
  CHECK(beats.back()["mix_shares"] == Json::array({0.75, 0.25}));
  const Json table = json_of(out + "/metrics.json")["mixture"];
  CHECK(table[0]["data"] == a);
  CHECK(table[0]["weight"] == 0.75);
  CHECK(table[0]["rows"] == rows * 3 / 4);
  CHECK(table[1]["rows"] == rows / 4);
  const double epochs = 96 / static_cast<double>((data.train.sources()[0]->size() - 1) / 48);
  CHECK(table[0]["epochs"] == epochs);
  CHECK(beats.back()["mix_epochs"][0] == epochs);
  CHECK(heartbeats(out, 0, "boot").at(0)["mixture"][1]["data"] == b);
  CHECK(has(read_text(out + "/ranks/rank_0.log"),
            fmt::format("75.0% of the rows from {} ({:.2f} epochs), 25.0% of the rows from {}", a, epochs, b)));
  // What rows hold of documents: means over the rows of both.
  const auto alone = [&](const std::string& path) {
    std::vector<std::string> sets = strings_of(path);
    sets.push_back("train.seed=5");
    return open_data(load_config(kTiny, sets).config).document_stats["documents_per_row"].get<double>();
  };
  const double per_row = 0.75 * alone(a) + 0.25 * alone(b);
  CHECK(data.document_stats["documents_per_row"].get<double>() == Approx(per_row));
  double parts = 0;
  for (const auto& [length, number] : data.parts.documents) parts += static_cast<double>(number);
  CHECK(parts / static_cast<double>(data.parts.rows) == Approx(per_row).epsilon(0.02));
  const std::string report = corpora.file("report.html");
  run_ok("report " + out + " --out " + report);
  CHECK(has(read_text(report), fmt::format("75.0% of the rows, {:.2f} epochs", epochs)));
}

TEST_CASE("mixture: without weights, shares are those of the tokens; strings are one component", "[train][mixture]") {
  const Corpora corpora;
  const std::string a = corpora.file("a.jsonl"), b = corpora.file("b.jsonl"), c = corpora.file("c.jsonl");
  std::vector<std::string> sets = strings_of(fmt::format(R"(["{}",{{"path":"{}"}},"{}"])", a, b, c));
  const Config config = load_config(kTiny, sets).config;
  REQUIRE(config.data.components.size() == 2);
  CHECK(config.data.components[0].path == std::vector<std::string>{a, c});
  const DataSource data = open_data(config);
  const double tokens = static_cast<double>(data.train.size());
  for (size_t i = 0; i < 2; ++i)
    CHECK(data.train.share(i) == Approx(static_cast<double>(data.train.sources()[i]->size()) / tokens).margin(1e-6));
  CHECK(data.val.count() == 2);
  CHECK(data.val.shares() == data.train.shares());
  CHECK(config_to_json(config_from_json(config_to_json(config))) == config_to_json(config));
  sets.push_back("data.val_paths=" + corpora.file("val.jsonl"));
  write_text(corpora.file("val.jsonl"), R"({"text":")" + std::string(400, 'v') + "\"}\n");
  const DataSource one_val = open_data(load_config(kTiny, sets).config);
  CHECK(one_val.val.count() == 1);
  CHECK(one_val.val.size() == 401);
  sets.push_back("data.val_fraction=0");
  CHECK(one_val.train.size() == open_data(load_config(kTiny, sets).config).train.size());  // no component is split
}

TEST_CASE("mixture: shards have their own validation shards, and a resume finds them where they are",
          "[train][mixture]") {
  const Corpora corpora;
  corpora.shards("a");
  corpora.shards("b");
  const auto keys = [&](const std::string& a) {
    return corpora.paths(fmt::format(R"([{{"path":"{}","weight":2}},{{"path":"{}","weight":1}}])", corpora.file(a),
                                     corpora.file("b")),
                         "shards") +
           "--set train.eval_every=2 --set train.save_every=2 --set train.keep_last=0 ";
  };
  const std::string out = corpora.file("run"), again = corpora.file("again");
  run_ok(train_args(out, keys("a") + "--set train.steps=4"));
  const Json paths = json_of(out + "/config.json")["data"]["paths"];
  CHECK(paths[0]["val_paths"] == Json::array({corpora.file("a")}));
  CHECK(paths[1]["val_paths"] == Json::array({corpora.file("b")}));
  const std::string from = "--resume " + out + "/checkpoints/step_2 ";
  fs::rename(corpora.file("a"), corpora.file("moved"));
  run_ok(train_args(again, keys("moved") + "--set train.steps=4 " + from));
  CHECK(same_file(out + kWeights, again + kWeights));
  CHECK(same_file(out + "/val.csv", again + "/val.csv") == false);  // step 2's row is not there
  CHECK(column(out + "/val.csv", "val_loss").at(4) == column(again + "/val.csv", "val_loss").at(4));
}

TEST_CASE("mixture: a resume with other weights or components is refused with what differs, or accepted",
          "[train][mixture]") {
  const Corpora corpora;
  const std::string out = corpora.file("run");
  const std::string keys = "--set train.save_every=2 --set train.keep_last=0 --set train.steps=4 ";
  run_ok(train_args(out, corpora.mixture({"a:0.5", "b:0.5"}) + keys));
  const std::string from = "--overwrite --resume " + out + "/checkpoints/step_2 ";
  struct Case {
    std::vector<std::string> words;
    std::vector<std::string> says;
  };
  const Case cases[] = {{{"a:0.25", "b:0.75"}, {"data.train.mixture[0].share is 0.5, but", "a.jsonl has 0.25 now"}},
                        {{"a:0.5", "c:0.5"}, {"data.train.mixture[1].tokens", "c.jsonl", "b.jsonl ("}},
                        {{"b:0.5", "a:0.5"}, {"data.train.mixture[0].tokens"}},
                        {{"a:1", "b:1", "c:1"}, {"its data.paths has 2 components, and now 3"}},
                        {{"a"}, {"its data.paths has 2 components, and now 1"}}};
  for (const Case& c : cases) {
    refused(train_args(corpora.file("again"), corpora.mixture(c.words) + keys + from), 1, c.says);
    run_ok(train_args(corpora.file("again"), corpora.mixture(c.words) + keys + from + "--accept-changed-data"));
  }
  // Equal shares in other words, and a limit of epochs, change no row.
  run_ok(train_args(corpora.file("again"), corpora.mixture({"a:3:50", "b:3"}) + keys + from));
  CHECK(same_file(out + kWeights, corpora.file("again") + kWeights));
}

TEST_CASE("mixture: bad entries are errors that name key and value", "[train][mixture]") {
  const Corpora corpora;
  const std::string a = corpora.file("a.jsonl"), b = corpora.file("b.jsonl"), tiny = corpora.file("tiny.jsonl");
  write_text(tiny, "{\"text\":\"xyz\"}\n");
  const auto list = [&](const std::string& second) {
    return corpora.paths(fmt::format(R"([{{"path":"{}","weight":1}},{}])", a, second));
  };
  const auto entry = [&](const std::string& more) { return list(fmt::format(R"({{"path":"{}",{}}})", b, more)); };
  struct Case {
    std::string keys;
    std::vector<std::string> says;
    int exit_code = 2;
  };
  const Case cases[] = {
      {entry(R"("weight":"much")"), {"data.paths[1].weight is \"much\": a number, above 0,"}},
      {entry(R"("weight":0)"), {"data.paths[1].weight is 0", "above 0"}},
      {entry(R"("weight":-0.5)"), {"data.paths[1].weight is -0.5", "above 0"}},
      {entry(R"("weight":NaN)"), {"data.paths is \"[{", "not valid JSON"}},
      {entry(R"("weight":null)"), {"data.paths[1].weight is null"}},
      {entry(R"("weight":1e-9)"), {"b.jsonl is 1e-09 (weight 1e-09)", "5.96e-08"}},
      {entry(R"("weight":1,"epochs":0)"), {"data.paths[1].epochs is 0", "at least 1"}},
      {entry(R"("weight":1,"epochs":1.5)"), {"data.paths[1].epochs is 1.5", "an integer"}},
      {entry(R"("wieght":1)"), {"unknown key data.paths[1].wieght (value 1)", "did you mean"}},
      {entry(R"("epochs":1)"), {"a.jsonl has the weight 1, but", "b.jsonl has none"}},
      {list("\"" + b + "\""), {"a.jsonl has the weight 1, but", "b.jsonl has none"}},
      {list(R"({"weight":1})"), {"data.paths[1] is {\"weight\":1}: it lacks data.paths[1].path"}},
      {list(R"({"path":[],"weight":1})"), {"data.paths[1].path is []"}},
      {list(R"({"path":3,"weight":1})"), {"data.paths[1].path is 3"}},
      {list("3"), {"data.paths[1] is 3: a string or an object"}},
      {corpora.paths("{\"path\":\"" + a + "\"}"), {"data.paths is {\"path\""}},
      {list(R"({"path":")" + tiny + R"(","weight":1})"),
       {"tiny.jsonl has 4 tokens; one sequence of train.seq_len = 48 needs 49"},
       1},
      {list(R"({"path":")" + a + R"(","weight":1})"), {"a.jsonl, to evaluate on, holds the same"}, 1},
      {list(R"({"path":"/nowhere.txt","weight":1})"), {"/nowhere.txt"}, 1},
      {entry(R"("weight":1,"val_paths":"x")") + "--set data.val_paths=y ", {"data.val_paths is y", "b.jsonl"}},
      {corpora.mixture({"a:1", "b:1:1"}) + "--set train.steps=400 ",
       {"b.jsonl runs out: its 1 epoch of", "rows of 48 tokens", "train.steps 400 needs 400"}},
      {corpora.mixture({"a::1"}) + "--set train.steps=400 ", {"a.jsonl runs out: its 1 epoch of", "needs 800"}},
      {corpora.mixture({"a:1", "b:1:2"}) + kPacked + "--set train.steps=900 ", {"b.jsonl runs out: its 2 epochs of"}},
  };
  for (const Case& c : cases) {
    INFO(c.keys);
    refused(train_args(corpora.file("run"), c.keys), c.exit_code, c.says);
    CHECK_FALSE(fs::exists(corpora.file("run/training.csv")));
  }
  // An epoch that is used up to the last row is no error, also where a resume uses it.
  const DataSource data = open_data(load_config(kTiny, strings_of(a)).config);
  const int64_t steps = (data.train.size() - 1) / 48;
  const std::string keys =
      corpora.mixture({"a::1"}) +
      "--set train.save_every=50 --set train.keep_last=0 --set train.micro_batch_size=1 --overwrite ";
  const auto args = [&](int64_t n) {
    return train_args(corpora.file("run"), keys + fmt::format("--set train.steps={} ", n));
  };
  run_ok(args(steps));
  const std::string from = "--resume " + corpora.file("run/checkpoints/step_50");
  refused(args(steps + 1) + from, 2, {"a.jsonl runs out"});
  run_ok(args(steps) + from);
}

TEST_CASE("config: an absent model.vocab_size is the data's", "[train][mixture]") {
  const Corpora corpora;
  corpora.shards("a");
  Json config = read_json_file(kTiny);
  config["model"].erase("vocab_size");
  config["log"]["out_dir"] = corpora.file("run");
  config["runtime"] = {{"device", "cpu"}};
  const std::string file = corpora.file("config.json");
  const auto with = [&](const std::string& kind, const Json& paths) {
    config["data"] = {{"kind", kind}, {"paths", paths}};
    write_text(file, config.dump());
    return "train " + file + " --set train.steps=1 --overwrite";
  };
  for (const auto& [kind, name] : {std::pair{"text", "a.jsonl"}, {"shards", "a"}}) {
    run_ok(with(kind, corpora.file(name)));
    CHECK(json_of(corpora.file("run/config.json"))["model"]["vocab_size"] == 256);
  }
  fs::rename(corpora.file("a/manifest.json"), corpora.file("manifest.json"));
  refused(with("shards", corpora.file("a") + "/*.bin"), 2, {"lacks model.vocab_size", "no manifest.json", "/a/*.bin"});
  refused(with("synthetic", Json::array()), 2, {"lacks model.vocab_size", "kind synthetic"});
  refused("train " + kTiny + " --set model.vocab_size=1", 2, {"model.vocab_size is 1"});
}
