#include "io/chat/chat_format.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace fs = std::filesystem;
using chat::Dict;
using chat::Rendered;
using chat::Template;
using chat::Value;

namespace {

constexpr const char *kDefault = "default", *kToolUse = "tool_use", *kTemplates = "templates", *kSource = "source",
                     *kSpecialTokens = "special_tokens", *kConfigFile = "tokenizer_config.json",
                     *kJinjaFile = "chat_template.jinja", *kTemplateKey = "chat_template";

constexpr const char* kChatML = R"({%- if tools %}
{{- raise_exception('ChatML has no form for tools: name a template that has one (data.chat_template)') }}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
{%- if message.content is not string %}
{{- raise_exception('ChatML needs a string as the `content` of each message, and one has none') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
)";

Json parse_file(const std::map<std::string, std::string>& files, const char* name, const std::string& folder) {
  const auto found = files.find(name);
  if (found == files.end()) return Json::object();
  const std::string path = folder + "/" + name;
  Json json = parse_json(found->second, path);
  TRIAD_CHECK(json.is_object(), "{}: a JSON object is needed, found {}", path, brief(json));
  return json;
}

Value read_message(const Json& message, const std::string& place) {
  TRIAD_CHECK(message.is_object(), "{} is {}: an object is needed", place, brief(message));
  constexpr const char* kReasoning[] = {"reasoning_content", "thinking", "reasoning"};
  Dict dict;
  const Json* reasoning = nullptr;
  for (const char* name : kReasoning)
    if (reasoning == nullptr && message.contains(name) && !message[name].is_null()) reasoning = &message[name];
  if (reasoning != nullptr) dict.set("thinking", Value::from_json(*reasoning));
  for (const auto& [key, value] : message.items())
    if (!value.is_null()) dict.set(key, Value::from_json(value));
  if (reasoning != nullptr) dict.set("reasoning_content", Value::from_json(*reasoning));
  return Value::dict(std::move(dict));
}

bool is_assistant(const Value& message) {
  const Value* const role = message.dict().find("role");
  return role != nullptr && role->is_string() && role->string() == "assistant";
}

// The text that ends a message's content, as it stands in the record; empty if it has none.
std::string_view content_end(const Value& message) {
  const Value* content = message.dict().find("content");
  if (content != nullptr && content->is_list() && !content->list().items.empty() &&
      content->list().items.back().is_dict())
    content = content->list().items.back().dict().find("text");
  if (content == nullptr || !content->is_string()) return {};
  const std::string_view text = content->string();
  return text.substr(0, length_without_trailing_space(text));
}

size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

// The answer in a turn: without its header, which the generation prompt writes, and without the white space that
// follows the end of a turn, after which the model has stopped.
ChatFormat::Span answer_in(std::string_view text, const Rendered::Span& turn, const std::vector<std::string>& headers,
                           const Value& message) {
  const std::string_view written = text.substr(turn.begin, turn.end - turn.begin);
  size_t begin = 0;
  for (const std::string& header : headers) {
    size_t common = common_prefix(written, header);
    // A header that continues otherwise, as with thinking, has whole lines in common.
    if (common < header.size()) common = written.substr(0, common).rfind('\n') + 1;
    begin = std::max(begin, common);
  }
  const size_t shown = length_without_trailing_space(written), content = content_end(message).size();
  const bool ends_in_content = content > 0 && written.substr(0, shown).ends_with(content_end(message));
  const size_t end = ends_in_content || shown <= begin ? written.size() : shown;
  return {turn.begin + begin, turn.begin + std::max(begin, end)};
}

// The small files of a model's folder that say how conversations are written, as far as there are any.
std::map<std::string, std::string> chat_files_in(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const char* name : {kConfigFile, "special_tokens_map.json", kJinjaFile}) {
    std::error_code ignored;
    const std::string path = folder + "/" + name;
    if (fs::is_regular_file(path, ignored)) files.emplace(name, read_file(path));
  }
  return files;
}

}  // namespace

Conversation read_conversation(const Json& record, const std::string& place) {
  Conversation conversation;
  const Json messages = record.value("messages", Json());
  TRIAD_CHECK(messages.is_array(), "{}: `messages` is {}: a list is needed", place, brief(messages));
  TRIAD_CHECK(!messages.empty(), "{}: `messages` is an empty list", place);
  try {
    for (const Json& message : messages)
      conversation.messages.push_back(
          read_message(message, fmt::format("message {}", conversation.messages.size() + 1)));
    const Json tools = record.value("tools", Json());
    const bool none = tools.is_null() || tools == Json("") || tools == Json(false) || tools == Json::object();
    if (!none) {
      const bool objects = tools.is_array() &&
                           std::all_of(tools.begin(), tools.end(), [](const Json& tool) { return tool.is_object(); });
      if (!objects) fail("`tools` is {}: a list of objects is needed", brief(tools));
      conversation.tools = Value::from_json(tools);
    }
    const Json more = record.value("chat_template_kwargs", Json());
    if (!more.is_null() && !more.is_object()) fail("`chat_template_kwargs` is {}: an object is needed", brief(more));
    for (const auto& [key, value] : more.items()) conversation.more.set(key, Value::from_json(value));
  } catch (const Error& e) { fail("{}: {}", place, e.what()); }
  return conversation;
}

ChatFormat::ChatFormat(std::string source, std::map<std::string, std::string> templates, Json special_tokens)
    : source_(std::move(source)), templates_(std::move(templates)), special_tokens_(std::move(special_tokens)) {
  const auto only = templates_.find(kDefault);
  if (only == templates_.end()) fail("{}: no template is named \"default\"", source_);
  parsed_.emplace(kDefault, Template(only->second, source_));
  if (const auto tools = templates_.find(kToolUse); tools != templates_.end()) try {
      parsed_.emplace(kToolUse, Template(tools->second, source_ + " (tool_use)"));
    } catch (const Error& e) { tool_use_error_ = e.what(); }
}

ChatFormat ChatFormat::chatml(Json special_tokens) {
  return {"ChatML", {{kDefault, kChatML}}, std::move(special_tokens)};
}

std::optional<ChatFormat> ChatFormat::from_files(const std::map<std::string, std::string>& files,
                                                 const std::string& folder) {
  std::map<std::string, std::string> templates;
  std::string source = folder + "/" + kConfigFile;
  const Json config = parse_file(files, kConfigFile, folder), value = config.value(kTemplateKey, Json());
  if (value.is_string()) {
    templates.emplace(kDefault, value.get<std::string>());
  } else if (value.is_array()) {
    for (const Json& entry : value) {
      const bool named = entry.is_object() && entry.contains("name") && entry["name"].is_string() &&
                         entry.contains("template") && entry["template"].is_string();
      TRIAD_CHECK(named, "{}: its chat_template has {}: an object with name and template is needed", source,
                  brief(entry));
      templates.emplace(entry["name"].get<std::string>(), entry["template"].get<std::string>());
    }
  } else {
    TRIAD_CHECK(value.is_null(), "{}: its chat_template is {}: a string or a list is needed", source, brief(value));
  }
  if (const auto file = files.find(kJinjaFile); file != files.end()) {  // the first choice in transformers too
    templates = {{kDefault, file->second}};
    source = folder + "/" + kJinjaFile;
  }
  if (templates.empty()) return std::nullopt;
  return ChatFormat(source, std::move(templates), special_tokens_in(files, folder));
}

ChatFormat ChatFormat::from_json(const Json& json, const std::string& place) {
  const auto strings = [&](const char* key) -> const Json& {
    TRIAD_CHECK(json.is_object() && json.contains(key) && json[key].is_object(), "{}: `{}` has to be an object", place,
                key);
    for (const auto& [name, text] : json[key].items())
      TRIAD_CHECK(text.is_string(), "{}: `{}.{}` is {}: a string is needed", place, key, shortened(name), brief(text));
    return json[key];
  };
  std::map<std::string, std::string> templates;
  const Json& texts = strings(kTemplates);
  for (const auto& [name, text] : texts.items()) templates.emplace(name, text.get<std::string>());
  const Json source = json.value(kSource, Json(place));
  return {source.is_string() ? source.get<std::string>() : place, std::move(templates), strings(kSpecialTokens)};
}

Json ChatFormat::to_json() const {
  return {{kSource, source_}, {kTemplates, templates_}, {kSpecialTokens, special_tokens_}};
}

const Template& ChatFormat::template_for(const Conversation& conversation) const {
  if (conversation.tools.is_none() || !templates_.contains(kToolUse)) return parsed_.at(kDefault);
  if (!tool_use_error_.empty()) fail("{}", tool_use_error_);
  return parsed_.at(kToolUse);
}

Rendered ChatFormat::apply(const Conversation& conversation, std::span<const Value> messages,
                           bool add_generation_prompt) const {
  Dict variables;
  for (const auto& [name, token] : special_tokens_.items()) variables.set(name, token.get<std::string>());
  for (const auto& [name, value] : conversation.more.items) variables.set(name, value);
  variables.set("messages", Value::list({messages.begin(), messages.end()}));
  variables.set("tools", conversation.tools);
  variables.set("documents", Value::none());
  variables.set("add_generation_prompt", add_generation_prompt);
  return template_for(conversation).render(variables, conversation.bytes);
}

std::string ChatFormat::text(const Conversation& conversation) const {
  return apply(conversation, conversation.messages, false).text;
}

std::string ChatFormat::prompt(const Conversation& conversation) const {
  return apply(conversation, conversation.messages, true).text;
}

// What the generation prompt may have written before the last answer, and so before each: what follows the last turn,
// or what is not there without it.
std::vector<std::string> ChatFormat::headers(const Conversation& conversation) const {
  std::span<const Value> before = conversation.messages;
  for (size_t i = before.size(); i-- > 1;)
    if (is_assistant(before[i])) {
      before = before.first(i);
      break;
    }
  const Rendered with = apply(conversation, before, true);
  const std::string without = apply(conversation, before, false).text;
  size_t turns_end = with.text.size();
  if (!with.turns.empty()) turns_end = with.turns.back().end;
  const std::string after = with.text.substr(turns_end);
  // White space between turns may be written by the turn before.
  return {after, after.substr(std::min(after.size(), after.find_first_not_of(" \n"))),
          with.text.substr(common_prefix(with.text, without))};
}

ChatFormat::Text ChatFormat::render(const Conversation& conversation) const {
  const Rendered rendered = apply(conversation, conversation.messages, false);
  const std::vector<Value>& messages = conversation.messages;
  Text text{rendered.text, std::vector<std::vector<Span>>(messages.size()), {}};
  const Template& used = template_for(conversation);
  if (used.marks_generated()) {
    for (const Rendered::Span& span : rendered.generated) {
      const bool known = span.message >= 0 && is_assistant(messages[static_cast<size_t>(span.message)]);
      (known ? text.answers[static_cast<size_t>(span.message)] : text.unknown).push_back({span.begin, span.end});
    }
    return text;
  }
  std::vector<std::string> before;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (!is_assistant(messages[i])) continue;
    const auto is_turn = [&](const Rendered::Span& span) { return span.message == static_cast<int64_t>(i); };
    const auto n = std::count_if(rendered.turns.begin(), rendered.turns.end(), is_turn);
    if (n != 1)
      fail(
          "{}: {} of message {}, so that its answer is not known: a template that marks answers with {{% generation "
          "%}} is needed, or data.learn all",
          used.name(), n == 0 ? "no loop over the messages writes the text" : "several loops write the text", i + 1);
    if (before.empty()) before = headers(conversation);
    Rendered::Span turn = *std::find_if(rendered.turns.begin(), rendered.turns.end(), is_turn);
    if (i + 1 == messages.size()) turn.end = text.text.size();  // the text's end, an eos_token, included
    text.answers[i].push_back(answer_in(text.text, turn, before, messages[i]));
  }
  return text;
}

std::string ChatFormat::turn_end() const {
  const std::string mark = "ANSWER";
  const Json record = {
      {"messages", {{{"role", "user"}, {"content", "x"}}, {{"role", "assistant"}, {"content", mark}}}}};
  Conversation conversation = read_conversation(record, source_);
  const Text text = render(conversation);
  std::string end;
  for (const Span& span : text.answers[1]) end = text.text.substr(span.begin, span.end - span.begin);
  const size_t at = end.rfind(mark);
  return at == std::string::npos ? "" : end.substr(at + mark.size());
}

Json default_special_tokens(const Tokenizer& tokenizer) {
  if (!tokenizer.available()) return Json::object();
  const std::string eot = tokenizer.decode(std::array{tokenizer.eot()});
  return {{"bos_token", eot}, {"eos_token", eot}};
}

std::map<std::string, std::string> imported_chat_files(const Json& state) {
  std::map<std::string, std::string> files;
  const Json origin = state.value("origin", Json::object());
  const Json texts = origin.is_object() ? origin.value("files", Json::object()) : Json::object();
  for (const auto& [name, text] : texts.items())
    if (text.is_string()) files.emplace(name, text.get<std::string>());
  return files;
}

std::string folder_of_tokenizer(const std::string& name) {
  if (name == "byte" || name == kNoTokenizer || name.empty()) return "";
  std::error_code ignored;
  if (fs::is_directory(name, ignored)) return name;
  const std::string parent = fs::path(name).parent_path().string();
  return parent.empty() ? "." : parent;
}

ChatFormat choose_chat_format(const std::string& choice, const Tokenizer& tokenizer,
                              const std::vector<std::string>& folders) {
  Json special_tokens = Json::object();
  for (const std::string& folder : folders) {
    if (folder.empty()) continue;
    std::map<std::string, std::string> files = chat_files_in(folder);
    std::error_code ignored;
    if (const std::string path = folder + "/" + kStateFile; fs::is_regular_file(path, ignored)) {
      const Json state = parse_json(read_file(path), path), data = state.value("data", Json());
      const bool trained = data.is_object() && data.contains("chat");
      if (choice.empty() && trained) return ChatFormat::from_json(data["chat"], path);
      files.merge(imported_chat_files(state));
    }
    if (choice.empty())
      if (std::optional<ChatFormat> own = ChatFormat::from_files(files, folder)) return std::move(*own);
    if (special_tokens.empty()) special_tokens = special_tokens_in(files, folder);
  }
  if (special_tokens.empty()) special_tokens = default_special_tokens(tokenizer);
  if (choice.empty() || choice == "chatml") return ChatFormat::chatml(std::move(special_tokens));
  std::error_code ignored;
  if (!fs::is_regular_file(choice, ignored))
    fail_usage("the chat template {}: chatml is allowed, or a file that is there", shortened(choice));
  return {choice, {{kDefault, read_file(choice)}}, std::move(special_tokens)};
}

ChatOptions with_format(ChatOptions options, const Tokenizer& tokenizer) {
  if (!options.format)
    options.format = std::make_shared<const ChatFormat>(ChatFormat::chatml(default_special_tokens(tokenizer)));
  return options;
}

bool same_chat(const Json& a, const Json& b) {
  const auto same = [&](const char* key) { return a.value(key, Json()) == b.value(key, Json()); };
  return same(kTemplates) && same(kSpecialTokens);
}

Json special_tokens_in(const std::map<std::string, std::string>& files, const std::string& folder) {
  Json tokens = Json::object();
  for (const char* file : {"special_tokens_map.json", kConfigFile}) {
    const Json json = parse_file(files, file, folder);
    for (const char* name :
         {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
      if (!json.contains(name) || json[name].is_null()) continue;
      const Json token = json[name].is_object() ? json[name].value("content", Json()) : json[name];
      TRIAD_CHECK(token.is_string(), "{}/{}: its {} is {}: a string is needed", folder, file, name, brief(json[name]));
      tokens[name] = token;
    }
  }
  return tokens;
}

}  // namespace triad
