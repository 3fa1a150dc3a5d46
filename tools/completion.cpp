// triad completion: what bash and zsh complete a command line with.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tools/verbs.h"
#include "train/config/schema.h"

namespace triad {

namespace {

using Strings = std::vector<std::string>;

// The scripts call `triad completion --line` at every Tab, and complete file names where it prints nothing.
// Readline replaces only what follows a word's last = or :, so these are cut off.
constexpr const char* kBash = R"(_triad() {
  local line=${COMP_LINE:0:COMP_POINT} word before
  word=${line##*[[:space:]]}
  mapfile -t COMPREPLY < <("${COMP_WORDS[0]/#\~/$HOME}" completion --line "$line" 2> /dev/null)
  [ ${#COMPREPLY[@]} -gt 0 ] || return 0
  [[ ${COMPREPLY[0]} != *= ]] || compopt -o nospace
  before=${word%"${word##*[=:]}"}
  [[ $COMP_WORDBREAKS != *=* ]] || COMPREPLY=("${COMPREPLY[@]#"$before"}")
}
complete -o default -F _triad triad
)";
constexpr const char* kZsh = R"(#compdef triad
_triad() {
  local -a found end
  found=("${(@f)$("${words[1]/#\~/$HOME}" completion --line "${(j: :)words[1,CURRENT]}" 2> /dev/null)}")
  [[ -n $found[1] ]] || { _files; return }
  [[ $found[1] != *= ]] || end=(-S '')
  compadd $end -a found
}
compdef _triad triad
[[ $funcstack[1] != _triad ]] || _triad "$@"
)";

// A shell's words up to the cursor; the last one, which may be empty, is incomplete.
Strings words_of(std::string_view line) {
  Strings words = {""};
  char quote = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (c == '\\' && quote != '\'' && i + 1 < line.size())
      words.back() += line[++i];
    else if (quote != 0 ? c == quote : c == '\'' || c == '"')
      quote = quote != 0 ? 0 : c;
    else if (quote == 0 && (c == ' ' || c == '\t'))
      words.emplace_back();
    else
      words.back() += c;
  }
  words.erase(std::remove(words.begin(), words.end() - 1, ""), words.end() - 1);
  return words;
}

// The words that an option takes, from its type's name in --help: TEXT:{one,two}.
Strings words_allowed(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const size_t begin = type.find('{'), end = type.rfind('}');
  Strings words;
  if (begin == std::string::npos || end == std::string::npos) return words;
  for (size_t at = begin + 1; at <= end;) {
    const size_t comma = std::min(type.find(',', at), end);
    words.push_back(type.substr(at, comma - at));
    at = comma + 1;
  }
  return words;
}

// What may follow --set: keys, or after `key=` the values of keys that have words.
Strings assignments(const std::string& word) {
  const Json groups = config_schema()["properties"];
  Strings found;
  for (const auto& [group, schema] : groups.items()) {
    if (!schema.contains("properties")) continue;
    for (const auto& [key, value] : schema["properties"].items()) {
      const std::string assignment = fmt::format("{}.{}=", group, key);
      if (!word.starts_with(assignment)) {
        found.push_back(assignment);
        continue;
      }
      const Json& choice = value.contains("anyOf") ? value["anyOf"].front() : value;
      if (choice.contains("enum"))
        for (const Json& each : choice["enum"]) found.push_back(assignment + each.get<std::string>());
      else if (choice.value("type", "") == "boolean")
        found.insert(found.end(), {assignment + "true", assignment + "false"});
    }
  }
  return found;
}

Strings values_of(const CLI::Option& option, const std::string& word) {
  if (option.check_lname("set")) return assignments(word);
  Strings words = words_allowed(option);
  if (option.check_lname("resume")) words.insert(words.end(), {"latest", "auto"});
  return words;
}

// The verb by this name, among the verbs of the program or a verb's own; null: there is none.
const CLI::App* verb_named(const CLI::App& app, const std::string& name) {
  for (const CLI::App* verb : app.get_subcommands({}))
    if (verb->get_name() == name) return verb;
  return nullptr;
}

// What the last word may become; empty: a file's name.
Strings candidates(const CLI::App& app, const Strings& words) {
  const std::string& word = words.back();
  Strings found;
  if (words.size() < 2) return found;
  if (words.size() == 2 || (words.size() == 3 && words[1] == "help")) {
    for (const CLI::App* verb : app.get_subcommands({})) found.push_back(verb->get_name());
    if (words.size() == 2) found.insert(found.end(), {"help", "--help", "--version"});
    return found;
  }
  const CLI::App* verb = verb_named(app, words[1]);
  if (verb == nullptr) return found;
  for (size_t i = 2; i + 1 < words.size(); ++i)  // a verb's own verb, such as `train` of `tokenizer`
    if (const CLI::App* const own = verb_named(*verb, words[i])) verb = own;
  const auto option_of = [&](const std::string& name) {
    const CLI::Option* const option = name.starts_with("--") ? verb->get_option_no_throw(name) : nullptr;
    return option != nullptr && option->get_items_expected_max() > 0 ? option : nullptr;
  };
  if (const CLI::Option* const option = option_of(words[words.size() - 2])) return values_of(*option, word);
  if (const size_t equals = word.find('='); word.starts_with("--") && equals != std::string::npos) {
    const std::string name = word.substr(0, equals), value = word.substr(equals + 1);
    if (const CLI::Option* const option = option_of(name))
      for (const std::string& each : values_of(*option, value)) found.push_back(fmt::format("{}={}", name, each));
    return found;
  }
  if (!word.starts_with("-"))
    for (const CLI::App* own : verb->get_subcommands({})) found.push_back(own->get_name());
  for (const CLI::Option* option : verb->get_options()) {
    if (!word.starts_with("-") && option->get_positional())
      for (const std::string& each : words_allowed(*option)) found.push_back(each);
    if (word.starts_with("-"))
      for (const std::string& name : option->get_lnames()) found.push_back("--" + name);
  }
  return found;
}

}  // namespace

void add_completion(CLI::App& app) {
  struct Options {
    std::string shell, line;
  };
  auto o = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("completion",
                         "print a script for bash or zsh that completes verbs, options and config keys; in ~/.bashrc: "
                         "eval \"$(triad completion bash)\"");
  auto* shell = verb->add_option("SHELL", o->shell, "whose script")->check(CLI::IsMember({"bash", "zsh"}));
  auto* line =
      verb->add_option("--line", o->line, "print what the last word of this command line may become")->excludes(shell);
  shell->excludes(line);
  verb->callback([o, &app, shell, line] {
    if (shell->count() == 0 && line->count() == 0) throw CLI::RequiredError("SHELL: bash or zsh");
    if (shell->count() > 0) return void(std::fputs(o->shell == "bash" ? kBash : kZsh, stdout));
    const Strings words = words_of(o->line);
    for (const std::string& each : candidates(app, words))
      if (each.starts_with(words.back())) std::puts(each.c_str());
  });
}

}  // namespace triad
