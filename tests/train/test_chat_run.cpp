// Runs on conversations: the template that is trained, kept, compared, exported and talked in; packing by default; what
// is refused.
#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "tests/support/checked_run.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/config/load_config.h"
#include "train/run/data_source.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

class Chats {
 public:
  Chats() {
    std::string text;
    for (int i = 0; i < 200; ++i) {
      Json messages = Json::array();
      for (int turn = 0; turn <= i % 3; ++turn) {
        messages.push_back({{"role", "user"}, {"content", fmt::format("{}+{}?", i % 10, turn)}});
        messages.push_back({{"role", "assistant"}, {"content", fmt::format("{}", i % 10 + turn)}});
      }
      text += Json{{"messages", messages}}.dump() + "\n";
    }
    write_text(file("chats.jsonl"), text);
    write_text(file("t.jinja"),
               "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '[end]' }}{% endfor %}"
               "{% if add_generation_prompt %}[assistant]{% endif %}");
  }
  std::string file(const std::string& name) const { return folder_.file(name); }
  std::string keys(const std::string& more = "") const {
    return "--set data.kind=text --set data.paths=" + file("chats.jsonl") +
           " --set train.seq_len=256 --set train.steps=4 --set train.save_every=2 --set train.eval_every=2 " + more;
  }
  std::string train(const std::string& name, const std::string& more = "") const {
    return run_ok(train_args(file(name), keys(more))), file(name);
  }

 private:
  TemporaryFolder folder_;
};

// What `triad chat` prints for these lines of input.
std::string talk(const std::string& args, const std::string& input) {
  const Outcome outcome = run_command(fmt::format("printf '{}' | {} chat {}", input, TRIAD_PROGRAM, args));
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return outcome.standard_output;
}

}  // namespace

TEST_CASE("chat: a run keeps its template, which resume, evaluation, export and chat use", "[train][chat]") {
  const Chats chats;
  const std::string out = chats.train("run");
  const Json chat = json_of(out + "/checkpoints/step_4/state.json")["data"]["chat"];
  CHECK(chat["source"] == "ChatML");
  CHECK(has(read_text(out + "/ranks/rank_0.log"), "chat template: ChatML"));
  CHECK(column(out + "/val.csv", "val_loss").size() == 2);
  const std::string from = "--resume " + out + "/checkpoints/step_2 ";
  const std::string again = chats.train("again", from);
  CHECK(same_file(out + kWeights, again + kWeights));
  refused(train_args(chats.file("other"), chats.keys(from + "--set data.chat_template=" + chats.file("t.jinja"))), 1,
          {"chat template of \"ChatML\"", "t.jinja"});
  refused(train_args(chats.file("other"), chats.keys(from + "--set data.learn=last")), 1, {"data.learn"});
  CHECK(has(run_ok("eval --checkpoint " + out + " --data " + chats.file("chats.jsonl") + " --seq 64"), "loss"));
  // Another run begins from the template that this one was trained with.
  const std::string other = chats.train("custom", "--set data.chat_template=" + chats.file("t.jinja"));
  const std::string next = chats.train("next", "--set train.init_from=" + other);
  CHECK(json_of(next + "/checkpoints/step_4/state.json")["data"]["chat"]["source"] == chats.file("t.jinja"));
  for (const auto& [run, text] :
       {std::pair{out, chat["templates"]["default"].get<std::string>()}, {next, read_text(chats.file("t.jinja"))}}) {
    const std::string hf = run + "_hf";
    run_ok("export " + run + " --out " + hf);
    CHECK(read_text(hf + "/chat_template.jinja") == text);
    CHECK(has(read_text(hf + "/README.md"), "apply_chat_template"));
    CHECK(has(read_text(hf + "/README.md"), "The assistant's answers were learned."));
    // The same seed gives the same answers, and what ends a turn is not printed.
    const std::string answers = talk(run + " --tokens 20 --seed 3", "1+1?\\n/clear\\n1+1?\\n");
    CHECK(answers == talk(run + " --tokens 20 --seed 3", "1+1?\\n/clear\\n1+1?\\n/exit\\n2+2?\\n"));
    CHECK(talk(run + " --tokens 20 --temperature 0 --system 'Be brief' --set-variable x=1", "1+1?\\n\\n2+2?\\n") ==
          talk(run + "/checkpoints/step_4 --tokens 20 --temperature 0 --system 'Be brief'", "1+1?\\n2+2?\\n"));
  }
}

TEST_CASE("chat: conversations are packed by best_fit, with little padding, unless the config says otherwise",
          "[train][chat]") {
  const Chats chats;
  const std::string out = chats.train("run");
  const Json data = json_of(out + "/config.json")["data"];
  CHECK(data["packing"] == "best_fit");
  CHECK(data["max_documents"] == -1);
  CHECK(json_of(chats.train("stream", "--set data.packing=stream") + "/config.json")["data"]["packing"] == "stream");
  const auto open = [&](const std::string& more) {
    std::vector<std::string> sets = {"data.kind=text", "data.paths=" + chats.file("chats.jsonl"), "train.seq_len=1024"};
    if (!more.empty()) sets.push_back(more);
    Config config = load_config(kTiny, sets).config;
    resolve_documents(config);
    return open_data(config);
  };
  const DataSource packed = open(""), limited = open("data.max_documents=8");
  CHECK(packed.document_stats["padded_share"].get<double>() < 0.05);
  CHECK(limited.document_stats["padded_share"].get<double>() > 0.1);
  CHECK(packed.rows.max_documents > 8);
  // A run that was resumed keeps its packing.
  const std::string stream = chats.file("stream");
  run_ok(train_args(chats.file("resumed"), chats.keys("--resume " + stream + "/checkpoints/step_2 ")));
  CHECK(json_of(chats.file("resumed/config.json"))["data"]["packing"] == "stream");
  write_text(chats.file("texts.jsonl"), "{\"text\": \"" + std::string(900, 'x') + "\"}\n");
  Config texts = load_config(kTiny, {"data.kind=text", "data.paths=" + chats.file("texts.jsonl")}).config;
  resolve_documents(texts);
  CHECK(texts.data.packing == Packing::stream);
}

TEST_CASE("chat: shards keep the template of their conversations", "[train][chat]") {
  const Chats chats;
  const std::string shards = chats.file("shards");
  const std::string said = run_ok("data --input " + chats.file("chats.jsonl") + " --chat-template " +
                                  chats.file("t.jinja") + " --learn last --out " + shards);
  CHECK(has(said, "chat template: " + chats.file("t.jinja")));
  const std::string keys = "--set data.kind=shards --set data.paths=" + shards + " --set train.steps=2 ";
  run_ok(train_args(chats.file("run"), keys));
  CHECK(json_of(chats.file("run/config.json"))["data"]["packing"] == "best_fit");
  run_ok("export " + chats.file("run") + " --out " + chats.file("hf"));
  CHECK(read_text(chats.file("hf/chat_template.jinja")) == read_text(chats.file("t.jinja")));
  for (const auto& [key, value] : {std::pair{"chat_template", "chatml"}, {"learn", "all"}})
    refused(train_args(chats.file("other"), keys + fmt::format("--set data.{}={}", key, value)), 2,
            {fmt::format("data.{}", key), "triad data"});
}

TEST_CASE("chat: bad templates and roles are errors that name file, line and what is wrong", "[train][chat]") {
  const Chats chats;
  write_text(chats.file("bad.jinja"), "a\n{% with %}");
  write_text(chats.file("loop.jinja"),
             "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}");
  write_text(
      chats.file("order.jinja"),
      "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no ' ~ m.role) }}{% endif %}{% endfor %}");
  const auto with = [&](const std::string& file) {
    return train_args(chats.file("run"), chats.keys("--set data.chat_template=" + file));
  };
  refused(with("/nowhere.jinja"), 2, {"/nowhere.jinja", "chatml"});
  refused(with(chats.file("bad.jinja")), 1, {"bad.jinja: line 2", "{% with %} is not supported"});
  refused(with(chats.file("loop.jinja")), 1, {"chats.jsonl: line 1", "loop.jinja: line 1", "does it loop?"});
  refused(with(chats.file("order.jinja")), 1, {"chats.jsonl: line 1", "order.jinja: line 1", "no assistant"});
  refused(train_args(chats.file("run"), chats.keys("--set data.learn=some")), 2, {"data.learn", "assistant", "last"});
  CHECK_FALSE(fs::exists(chats.file("run/training.csv")));
  run_ok(train_args(chats.file("plain"), "--set train.steps=1"));
  refused("chat " + chats.file("plain"), 2, {"not trained on conversations", "--chat-template"});
  const std::string run = chats.train("short");
  const Outcome full =
      run_command(fmt::format("printf '{}\\n' | {} chat {} --context 30", std::string(40, 'x'), TRIAD_PROGRAM, run));
  CHECK(full.exit_code == 1);
  CHECK(has(full.output, "of 30 that the context holds"));
}
