// The configs that come with Triad: each loads and is in configs/'s guide, and those made to be compared differ in what
// they compare alone.
#include <filesystem>
#include <set>
#include <string>

#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/checkpoint/state.h"
#include "train/config/load_config.h"
#include "train/config/other_names.h"
#include "train/config/schedule.h"

using namespace triad;

namespace {

const std::string kConfigs = TRIAD_SOURCE_DIR "/configs/";

Config load(const std::string& name) { return load_config(kConfigs + name, {}).config; }

}  // namespace

TEST_CASE("configs: each one loads, begins with a comment and is in the guide", "[train]") {
  const std::string guide = test::read_text(kConfigs + "README.md");
  int configs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kConfigs)) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() != ".json") continue;
    INFO(name);
    ++configs;
    CHECK_NOTHROW(load(name));
    CHECK(test::read_text(entry.path().string()).starts_with("// "));
    CHECK(test::has(guide, name));
  }
  CHECK(configs > 20);
}

TEST_CASE("configs: other trainers' names lead to keys, and no key has such a name", "[train]") {
  std::string last;
  for (const auto& [other, key] : kOtherNames) {
    INFO(other << " " << key);
    CHECK(key_named(other) == key);
    CHECK(key_named(std::string(key).substr(std::string(key).find('.') + 1)) == key);
    CHECK(last < other);
    last = other;
  }
  CHECK(key_named("max-seq-len") == "train.seq_len");
  CHECK(key_named("lr") == "train.lr");
  CHECK(key_named("") == "");
  CHECK(key_named("bananas") == "");
}

TEST_CASE("configs: m7c_bytes_8k_index is m7c_bytes_8k but for attention", "[train]") {
  const Config nsa = load("m7c_bytes_8k.json");
  Config index = load("m7c_bytes_8k_index.json"), msa = load("m7c_125m_msa.json");
  std::set<std::string> keys;
  for (const std::string& line : differences(nsa, index)) keys.insert(line.substr(0, line.find(' ')));
  CHECK(keys == std::set<std::string>{"log.out_dir", "model.dense_layers", "nsa.branches", "nsa.init_blocks",
                                      "nsa.l_sel", "nsa.local_blocks", "nsa.selector"});
  // The index's blocks are those of the config without text.
  CHECK(group_to_json(index.model.nsa) == group_to_json(msa.model.nsa));
}
