// Fuzzes reading config files and --set (train/config/load_config.h).
#include "tests/fuzz/contract.h"
#include "train/config/load_config.h"

namespace triad::fuzz {

void read_config(std::string_view bytes) {
  const std::vector<std::string_view> parts = sections(bytes, 2);
  const std::string path = scratch_file("config.json", parts[0]);
  std::vector<std::string> sets;
  for (std::string_view rest = parts[1]; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    sets.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  // Messages about a key do not name the file, because the value may come from --set; hence the empty file name.
  const std::optional<LoadedConfig> loaded = read_or_refuse("", [&] { return load_config(path, sets); });
  if (!loaded) return;
  const std::string printed = dump_json(config_to_json(loaded->config), 2);
  const Config again = config_from_json(parse_json(printed, "the config, printed"));
  expect(dump_json(config_to_json(again), 2) == printed, "printed and read again, it is another config: {}", printed);
  const std::optional<LoadedConfig> read =
      read_or_refuse("", [&] { return load_config(scratch_file("printed.json", printed), {}); });
  expect(read && dump_json(config_to_json(read->config), 2) == printed, "its echo does not load: {}", printed);
  // The checks before a run may read tokenizer files, but not for the tokenizer "byte".
  if (loaded->config.data.tokenizer == "byte") accepts("", [&] { loaded->config.check_run(); });
}

}  // namespace triad::fuzz
