#include "tools/huggingface/model_card.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/text.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "train/config/load_config.h"
#include "train/config/schedule.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

Json read_object(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return Json::object();
  Json json = parse_json(read_file(path.string()), path.string());
  TRIAD_CHECK(json.is_object(), "{}: a JSON object is needed, found {}", path.string(), brief(json));
  return json;
}

// A two-column table.
class Table {
 public:
  template <class... Args>
  void add(const std::string& name, fmt::format_string<Args...> format, Args&&... args) {
    text_ += fmt::format("| {} | {} |\n", name, fmt::format(format, std::forward<Args>(args)...));
  }
  std::string str() const { return "| | |\n| --- | --- |\n" + text_ + "\n"; }
  bool empty() const { return text_.empty(); }

 private:
  std::string text_;
};

// One kind of sparse attention, with its options.
std::string options_text(const NsaConfig& n) {
  if (n.branches == Branches::window) return fmt::format("a sliding window of {}", n.w);
  const std::string selected =
      fmt::format("{} blocks of {} selected{}", n.n_sel, n.l_sel, n.selector == Selector::index ? " by an index" : "");
  if (n.branches == Branches::selected) return selected;
  return fmt::format("blocks of {} tokens every {} compressed by {}, {}, window {}, {} gate", n.l, n.d, word_of(n.phi),
                     selected, n.w, word_of(n.gate.kind));
}

std::string attention_text(const ModelConfig& m) {
  if (!m.has_nsa()) return "dense" + m.rotation_text();
  const int64_t sparse = m.n_layers - m.count_layers(AttentionKind::dense);
  const std::string layers = sparse == m.n_layers ? "" : fmt::format(" in {} of {} layers", sparse, m.n_layers);
  std::string text = fmt::format("Native Sparse Attention{}: {}", layers, options_text(m.nsa));
  for (const NsaLayers& entry : m.nsa.layers)
    text += fmt::format("; in layers {} {}", entry.layers, options_text(entry.over(m.nsa)));
  return text + m.rotation_text();
}

std::string shape_table(const ModelSource& source, const ExportClass& c, DType dtype, const Tokenizer& tokenizer) {
  const ModelConfig& m = source.config.model;
  Table table;
  table.add("class", "{}", c.word());
  table.add("parameters", "{}, {}", count_parameters(m), name_of(dtype));
  table.add("layers, width", "{}, {}", m.n_layers, m.dim);
  table.add("heads", "{} in {}, widths {} (k) and {} (v)", m.n_heads, counted(m.n_kv_groups, "group"), m.d_k, m.d_v);
  table.add("MLP", "{}, {} hidden units", word_of(m.mlp), m.mlp_hidden);
  table.add("attention", "{}", attention_text(m));
  table.add("tokens", "{}{}", m.vocab_size,
            tokenizer.name() == "byte" ? ": bytes; the byte 0 separates documents and begins each text" : "");
  table.add("training length", "{} tokens", source.config.train.longest_seq_len());
  return table.str();
}

// The section on how Triad trained the weights.
std::string training_text(const ModelSource& source) {
  const Json figures = figures_of(source.folder);
  const Config& config = source.config;
  Table table;
  const auto number = [&](const char* key) {
    return figures.contains(key) && figures[key].is_number() ? figures[key].get<double>() : std::nan("");
  };
  if (const double step = number("step"); step > 0) table.add("optimizer steps", "{:.0f}", step);
  if (const double tokens = number("tokens"); tokens > 0) table.add("tokens trained on", "{:.0f}", tokens);
  if (table.empty()) return "These weights have not been trained by Triad.\n";
  const TrainConfig& train = config.train;
  table.add("optimizer", "{}", word_of(train.optimizer));
  const bool falls = train.schedule != Schedule::wsd || train.decay_steps() > 0;
  const std::string schedule = train.schedule == Schedule::wsd ? fmt::format("constant, and linear in the last {}",
                                                                             counted(train.decay_steps(), "step"))
                                                               : std::string(word_of(train.schedule));
  table.add("learning rate", "{} after {} of warm-up, then {}", train.lr, counted(train.warmup_steps, "step"),
            falls ? fmt::format("{} to {}", schedule, train.lr * train.min_lr_fraction) : "constant");
  if (!train.stages.empty())
    for (const TrainStage& stage : stages_of(train)) table.add("", "{}", stage_text(config, stage));
  if (const double loss = number("train_loss"); std::isfinite(loss)) table.add("training loss", "{:.4f} nats", loss);
  if (const double loss = number("val_loss"); std::isfinite(loss))
    table.add("validation loss", "{:.4f} nats a token, perplexity {:.3f}", loss, std::exp(loss));
  if (const double seconds = number("seconds"); std::isfinite(seconds)) table.add("seconds", "{:.0f}", seconds);
  return table.str() + fmt::format("Trained on {} data. The checkpoint's state.json holds all hyperparameters.\n",
                                   word_of(source.config.data.kind));
}

// What was learned of the conversations.
std::string learned_text(const DataConfig& data) {
  if (data.kind != DataKind::text) return "The loss mask of the token shards says what was learned.";
  if (data.learn == ChatLearn::all) return "All of their text was learned.";
  return data.learn == ChatLearn::last ? "The last answer of each was learned."
                                       : "The assistant's answers were learned.";
}

}  // namespace

Json figures_of(const std::string& folder) {
  Json state = read_object(fs::path(folder) / kStateFile);
  Json figures = Json::object();
  const auto take_state = [&] {
    for (const char* key : {"step", "tokens"})
      if (state.contains(key)) figures[key] = state[key];
  };
  take_state();
  std::vector<fs::path> places = {folder};
  // A run's checkpoint is in RUN/checkpoints/step_N.
  if (figures.contains("step")) places.push_back(fs::absolute(folder) / ".." / "..");
  for (const fs::path& place : places) {
    const Json metrics = read_object(place / "metrics.json");
    if (!metrics.contains("step") || (figures.contains("step") && figures["step"] != metrics["step"])) continue;
    for (const auto& [key, value] : metrics.items()) figures[key] = value;
    break;
  }
  if (figures.contains("step")) return figures;
  if (const std::optional<std::string> newest = find_newest_checkpoint(folder + "/checkpoints")) {
    state = read_object(fs::path(*newest) / kStateFile);
    take_state();
  }
  return figures;
}

std::string model_card(const std::string& name, const ModelSource& source, const ExportClass& c, DType dtype,
                       const Tokenizer& tokenizer, const std::optional<ChatFormat>& chat) {
  const std::string trust = c.huggingface ? "" : ", trust_remote_code=True";
  std::string text = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- triad\n";
  if (source.config.model.has_nsa()) text += "- native-sparse-attention\n";
  text += fmt::format("---\n\n# {}\n\nA decoder language model, exported by Triad.\n\n", printable(name));
  text += shape_table(source, c, dtype, tokenizer);
  text += "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n";
  text += fmt::format("model = AutoModelForCausalLM.from_pretrained(\"{}\"{})\n", printable(name), trust);
  if (tokenizer.available()) {
    text += fmt::format("tokenizer = AutoTokenizer.from_pretrained(\"{}\"{})\n", printable(name), trust);
    if (chat)
      text +=
          "messages = [{\"role\": \"user\", \"content\": \"Hello\"}]\n"
          "ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors=\"pt\", "
          "return_dict=True).input_ids\n";
    else if (!has_imported_tokens(source.origin))
      text += "ids = tokenizer(tokenizer.bos_token + \"Once\", return_tensors=\"pt\").input_ids\n";
    else
      text += "ids = tokenizer(\"Once\", return_tensors=\"pt\").input_ids\n";
    text += "print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))\n";
  }
  text += "```\n\n";
  if (!c.huggingface)
    text += fmt::format(
        "The folder contains the model's code in plain PyTorch (modeling_triad.py), because "
        "transformers has no class that holds it: {}.\n\n",
        c.reason);
  if (chat)
    text += fmt::format(
        "## Conversations\n\nTrained on conversations in the chat template of {}, which the tokenizer's files hold. "
        "{}\n\n",
        printable(chat->source()), learned_text(source.config.data));
  return text + "## Training\n\n" + training_text(source);
}

}  // namespace triad
