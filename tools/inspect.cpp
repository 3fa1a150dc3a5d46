// triad inspect: prints what is in a checkpoint, a Hugging Face transformers model folder, a token-shard folder, a
// safetensors file, a token shard, a text or JSONL.
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/parse.h"
#include "engine/process/text.h"
#include "engine/units.h"
#include "io/checkpoint.h"
#include "io/data/corpus.h"
#include "io/data/format/text_format.h"
#include "io/data/shards.h"
#include "io/data/text_input.h"
#include "io/file.h"
#include "io/json_config.h"
#include "io/safetensors.h"
#include "io/weight_index.h"
#include "model/params.h"
#include "tools/import_source.h"
#include "tools/options.h"
#include "tools/verbs.h"
#include "train/config/load_config.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

struct Statistics {
  int64_t finite = 0, nan = 0, inf = 0;
  double mean = 0, deviation = 0;  // mean and standard deviation over finite elements
};

template <class T>
Statistics statistics_of(std::span<const std::byte> bytes) {
  const int64_t n = static_cast<int64_t>(bytes.size() / sizeof(T));
  const auto element = [&](int64_t i) {
    T value;  // read by memcpy, because tensors may be unaligned in the file
    std::memcpy(&value, bytes.data() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return static_cast<double>(value);
  };
  Statistics s;
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = element(i);
    if (std::isnan(x))
      ++s.nan;
    else if (std::isinf(x))
      ++s.inf;
    else
      sum += x;
  }
  s.finite = n - s.nan - s.inf;
  if (s.finite == 0) return s;
  s.mean = sum / static_cast<double>(s.finite);
  for (int64_t i = 0; i < n; ++i) {
    const double x = element(i);
    if (std::isfinite(x)) squares += (x - s.mean) * (x - s.mean);
  }
  s.deviation = std::sqrt(squares / static_cast<double>(s.finite));
  return s;
}

// Statistics over a tensor's elements; nullopt for dtypes without statistics, such as 8-bit floats.
std::optional<Statistics> statistics_of(const std::string& dtype, std::span<const std::byte> bytes) {
  if (dtype == "F64") return statistics_of<double>(bytes);
  if (dtype == "F32") return statistics_of<float>(bytes);
  if (dtype == "F16") return statistics_of<_Float16>(bytes);
  if (dtype == "BF16") return statistics_of<bf16>(bytes);
  if (dtype == "I64") return statistics_of<int64_t>(bytes);
  if (dtype == "U64") return statistics_of<uint64_t>(bytes);
  if (dtype == "I32") return statistics_of<int32_t>(bytes);
  if (dtype == "U32") return statistics_of<uint32_t>(bytes);
  if (dtype == "I16") return statistics_of<int16_t>(bytes);
  if (dtype == "U16") return statistics_of<uint16_t>(bytes);
  if (dtype == "I8") return statistics_of<int8_t>(bytes);
  if (dtype == "U8" || dtype == "BOOL") return statistics_of<uint8_t>(bytes);
  return std::nullopt;
}

void inspect_safetensors(const std::string& path) {
  const SafetensorsFile file(path);
  size_t width = 6, dtype_width = 7, shape_width = 5;
  for (const TensorEntry& entry : file.entries()) {
    width = std::max(width, printable(entry.name).size());
    dtype_width = std::max(dtype_width, entry.dtype.size());
    shape_width = std::max(shape_width, entry.str().size() - entry.dtype.size());
  }
  fmt::print("{}\n{:<{}}  {:<{}}  {:<{}}  {:>10}  {:>12}  {:>12}  {:>8}  {:>8}\n", printable(path), "tensor", width,
             "dtype", dtype_width, "shape", shape_width, "MiB", "mean", "std", "nan", "inf");
  std::vector<const TensorEntry*> by_name;
  for (const TensorEntry& entry : file.entries()) by_name.push_back(&entry);
  std::sort(by_name.begin(), by_name.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
  int64_t elements = 0, bytes = 0, checksums = 0;
  for (const TensorEntry* entry : by_name) {
    const std::optional<Statistics> s = statistics_of(entry->dtype, file.read(*entry));
    const std::string shape = entry->str().substr(entry->dtype.size());
    fmt::print("{:<{}}  {:<{}}  {:<{}}  {:>10.3f}  ", printable(entry->name), width, entry->dtype, dtype_width, shape,
               shape_width, static_cast<double>(entry->bytes()) / kMiB);
    if (s)
      fmt::print("{:>12.5g}  {:>12.5g}  {:>8}  {:>8}\n", s->mean, s->deviation, s->nan, s->inf);
    else
      fmt::print("{:>12}  {:>12}  {:>8}  {:>8}\n", "-", "-", "-", "-");
    elements += entry->numel();
    bytes += entry->bytes();
    checksums += file.metadata().count("crc32/" + entry->name);
  }
  fmt::print("{}, {}, {:.3f} MiB; {}\n", counted(by_name.size(), "tensor"), counted(elements, "element"),
             static_cast<double>(bytes) / kMiB,
             checksums == 0 ? "no checksums" : counted(checksums, "checksum") + ", verified");
}

void inspect_shard(const std::string& path) {
  const Shard shard(path);
  const int64_t largest = shard.max_token();
  fmt::print("{}\ntoken shard, {}: {}, {} bytes, largest token {}\n", printable(path), shard.format(),
             counted(shard.size(), "token"), shard.bytes(), largest);
  if (shard.has_mask()) {
    const int64_t learned = shard.mask().count(0, shard.size());
    fmt::print("loss mask: {} {} learned, {:.2f}%\n", counted(learned, "token"), learned == 1 ? "is" : "are",
               100.0 * static_cast<double>(learned) / static_cast<double>(shard.size()));
  }
  constexpr int64_t kLargestVocabulary = 1 << 24;  // a file with a larger token is hardly a token shard
  constexpr size_t kHead = 12, kChunk = 1 << 16;
  if (largest >= kLargestVocabulary) return;
  std::vector<int64_t> counts(static_cast<size_t>(largest + 1), 0);
  std::vector<int32_t> tokens;
  for (int64_t begin = 0; begin < shard.size(); begin += kChunk) {
    tokens.resize(std::min(kChunk, static_cast<size_t>(shard.size() - begin)));
    shard.read(begin, tokens);
    for (const int32_t token : tokens) ++counts[static_cast<size_t>(token)];
  }
  std::vector<size_t> order(counts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return counts[a] > counts[b]; });
  const auto distinct = counts.size() - static_cast<size_t>(std::count(counts.begin(), counts.end(), 0));
  fmt::print("{}; the most frequent:\n{:>10}  {:>12}  {:>7}\n", counted(distinct, "distinct token"), "token", "count",
             "share");
  for (size_t i = 0; i < std::min(kHead, distinct); ++i)
    fmt::print("{:>10}  {:>12}  {:>6.2f}%\n", order[i], counts[order[i]],
               100.0 * static_cast<double>(counts[order[i]]) / static_cast<double>(shard.size()));
}

std::vector<std::string> safetensors_in(const std::string& folder) {
  std::vector<std::string> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<std::string> shards_in(const std::string& folder) {
  std::vector<std::string> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().extension() == ".bin" && is_shard(entry.path().string()))
      files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  return files;
}

// Prints the manifest that `triad data` wrote, if there is one, and each shard's length from its header.
void inspect_shard_folder(const std::string& path, const std::vector<std::string>& shards) {
  fmt::print("{}\n", printable(path));
  const std::string manifest = (fs::path(path) / "manifest.json").string();
  if (fs::exists(manifest)) {
    const Json said = parse_json(read_file(manifest), manifest);
    for (const auto& [key, value] : said.items())
      if (!value.is_structured()) fmt::print("  {}: {}\n", shortened(key), brief(value));
    for (const char* split : {"train", "val"})
      if (const Json part = said.value(split, Json()); part.is_object()) {
        const auto count_of = [&](const char* key, std::string_view noun) {
          const Json n = part.value(key, Json());
          return fmt::format("{} {}", brief(n), plural(n == 1 ? 1 : 2, noun));
        };
        fmt::print("  {}: {}, {}{}, {}\n", split, count_of("documents", "document"), count_of("tokens", "token"),
                   part.contains("learned") ? fmt::format(", {} of them learned", brief(part["learned"])) : "",
                   counted(part.value("shards", Json::array()).size(), "shard"));
      }
  }
  int64_t tokens = 0, bytes = 0;
  size_t width = 5;
  const auto name_of = [](const std::string& file) { return printable(fs::path(file).filename().string()); };
  for (const std::string& file : shards) width = std::max(width, name_of(file).size());
  fmt::print("{:<{}}  {:>14}  {:>10}  {}\n", "shard", width, "tokens", "MiB", "format");
  for (const std::string& file : shards) {
    const Shard shard(file);
    fmt::print("{:<{}}  {:>14}  {:>10.3f}  {}\n", name_of(file), width, shard.size(),
               static_cast<double>(shard.bytes()) / kMiB, shard.format());
    tokens += shard.size(), bytes += shard.bytes();
  }
  fmt::print("{}, {}, {:.3f} MiB\n", counted(shards.size(), "shard"), counted(tokens, "token"),
             static_cast<double>(bytes) / kMiB);
}

// Prints what a Hugging Face transformers model folder is, whether `triad import` takes it, and if so its tensors.
void inspect_huggingface(const std::string& path) {
  std::vector<std::string> files;
  try {
    const ImportSource source = open_import(path);
    const HuggingFaceConfig& c = source.config;
    int64_t bytes = 0;
    source.weights.for_each([&](const SafetensorsFile&, const TensorEntry& entry) { bytes += entry.bytes(); });
    fmt::print("{}\n  a model folder of Hugging Face's transformers: {}\n", printable(path), word_of(c.model_class));
    fmt::print("  {}, width {}, {} of {}, {}, MLP {}, vocabulary {}, {}\n", counted(c.n_layers, "layer"), c.dim,
               counted(c.n_heads, "head"), c.head_dim, counted(c.n_kv_heads, "key/value head"), c.mlp_hidden,
               c.vocab_size, counted(c.max_positions, "position"));
    if (!c.nsa.is_null()) fmt::print("  {}\n", model_in_folder(c).layers_text());
    fmt::print("  rope {} of theta {}{}{}{}{}\n", c.rope.type, c.rope.theta,
               c.nsa.is_null() ? model_in_folder(c).rotation_text() : "", c.tie_embeddings ? ", tied embeddings" : "",
               c.qkv_bias ? ", biases of q, k and v" : "", c.qk_norm ? ", norms of q and k" : "");
    fmt::print("  {} parameters, {} tensors in {}, {:.3f} MiB of {}\n", count_parameters(model_in_folder(c)),
               source.weights.count(), counted(source.weights.files().size(), "file"),
               static_cast<double>(bytes) / kMiB, source.dtypes());
    fmt::print("  tokenizer: {}\n", source.tokenizer->available()
                                        ? fmt::format("{} tokens", source.tokenizer->vocab_size())
                                        : "none; import takes the weights with a warning");
    fmt::print("  triad import takes it, unless a weight is not finite (columns nan and inf)\n");
    for (const SafetensorsFile& file : source.weights.files()) files.push_back(file.path());
  } catch (const Error& e) {
    fmt::print("{}\n  a model folder of Hugging Face's transformers\n  triad import cannot take it: {}\n",
               printable(path), printable(e.what()));
  }
  for (const std::string& file : files) {
    fmt::print("\n");
    inspect_safetensors(file);
  }
}

bool is_index(const std::string& path) { return path.ends_with(index_file_name("")); }

// Prints what an index holds. WeightIndex has checked it against its files.
void print_index(const WeightIndex& index) {
  fmt::print("  {}: {} in {}, {:.3f} MiB\n", printable(fs::path(index.path()).filename().string()),
             counted(index.count(), "tensor"), counted(index.files().size(), "file"),
             static_cast<double>(index.bytes()) / kMiB);
}

// The last row of a run's table up to a step, as {column: text}; empty if there is none.
std::map<std::string, std::string> last_row(const std::string& path, int64_t step) {
  std::map<std::string, std::string> found;
  std::error_code unknown;
  if (!fs::is_regular_file(path, unknown)) return found;
  std::vector<std::string> columns;
  const auto cells = [](const std::string& line) {
    std::vector<std::string> all;
    for (size_t begin = 0; begin <= line.size();) {
      const size_t end = std::min(line.find(',', begin), line.size());
      all.push_back(line.substr(begin, end - begin));
      begin = end + 1;
    }
    return all;
  };
  const std::string text = read_file(path);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::vector<std::string> row = cells(text.substr(begin, end - begin));
    begin = end + 1;
    if (columns.empty()) {
      columns = row;
      continue;
    }
    const std::optional<int64_t> at = parse_number<int64_t>(row.front());
    if (!at || *at > step || row.size() != columns.size()) continue;
    for (size_t i = 0; i < row.size(); ++i) found[columns[i]] = row[i];
  }
  return found;
}

// What a checkpoint or a finished run is, in a few lines: model, data, training, step and loss. state: state.json's
// content, or what of it a finished run knows. A config of another version may lack keys; then nothing is printed.
void print_summary(const std::string& folder, const Json& state) {
  try {
    const Config config = config_from_json(with_later_keys(state.at("config")));
    const TrainConfig& t = config.train;
    const int64_t step = state.at("step").get<int64_t>();
    const fs::path run =
        fs::exists(fs::path(folder) / "training.csv") ? fs::path(folder) : fs::path(folder).parent_path().parent_path();
    std::map<std::string, std::string> row = last_row((run / "training.csv").string(), step),
                                       val = last_row((run / "val.csv").string(), step);
    std::string loss = row.empty() ? "" : fmt::format(", loss {} (step {})", row["loss"], row["step"]);
    if (!val.empty()) loss += fmt::format(", validation loss {} (step {})", val["val_loss"], val["step"]);
    fmt::print("  step {} of {}{}\n", step, t.steps, loss);
    fmt::print("  model: {} parameters: {} of width {}, {}, vocabulary {}\n", count_parameters(config.model),
               config.model.layers_text(), config.model.dim, counted(config.model.n_heads, "head"),
               config.model.vocab_size);
    const std::string paths = printable(fmt::format("{}", fmt::join(config.data.paths(), ", ")));
    fmt::print("  data: {}{}{}\n", word_of(config.data.kind), paths.empty() ? "" : ": ", paths);
    fmt::print("  train: {} x {} tokens{}, {} {:.3g}, {}\n", t.micro_batch_size, t.seq_len,
               t.accumulate_grad_batches > 1 ? fmt::format(" x {} micro-steps", t.accumulate_grad_batches) : "",
               word_of(t.optimizer), t.lr, word_of(config.runtime.precision));
    fmt::print("  run: {}\n", printable(config.log.out_dir));
  } catch (const std::exception&) {}  // inspect prints what else is in the folder
}

// Prints what is in a folder: token shards, safetensors files, or a run's newest checkpoint.
void inspect_folder(const std::string& path) {
  if (const std::vector<std::string> shards = shards_in(path); !shards.empty())
    return inspect_shard_folder(path, shards);
  refuse_adapter(path);
  if (!is_checkpoint(path) && is_huggingface_folder(path)) return inspect_huggingface(path);
  const std::string folder = safetensors_in(path).empty() ? resolve_checkpoint(path) : path;
  fmt::print("{}\n", printable(folder));
  if (is_checkpoint(folder)) {
    const std::string file = (fs::path(folder) / kStateFile).string();
    const Json state = parse_json(read_file(file), file);
    print_summary(folder, state);
    for (const auto& [key, value] : state.items())
      if (!value.is_structured()) fmt::print("  {}: {}\n", shortened(key), brief(value));
  } else if (const std::string file = (fs::path(folder) / "config.json").string(); fs::exists(file)) {
    const std::string metrics = (fs::path(folder) / "metrics.json").string();
    if (fs::exists(metrics))
      print_summary(folder,
                    {{"config", read_json_file(file)}, {"step", read_json_file(metrics).value("step", Json())}});
  }
  for (const char* stem : {kWeightsStem, kMomentsStem})
    if (const std::string index = tensors_path(folder, stem); is_index(index) && has_tensors(folder, stem))
      print_index(WeightIndex(index));
  for (const std::string& file : safetensors_in(folder)) {
    fmt::print("\n");
    inspect_safetensors(file);
  }
}

void inspect_index(const std::string& path) {
  const WeightIndex index(path);
  print_index(index);
  for (const SafetensorsFile& file : index.files()) {
    fmt::print("\n");
    inspect_safetensors(file.path());
  }
}

// Prints what `triad data` would read from a text or JSONL file. A line that is no record throws.
void inspect_text(const std::string& path, TextFormat format) {
  int64_t documents = 0, bytes = 0, tokens = 0, learned = 0;
  bool jsonl = format == TextFormat::jsonl;
  encode_corpus({.files = {path}, .format = format}, ByteTokenizer(), {}, [&](const EncodedPiece& piece) {
    jsonl = piece.jsonl;
    for (const EncodedPiece::Part& part : piece.parts) documents += part.begins ? 1 : 0;
    bytes += piece.text_bytes;
    tokens += static_cast<int64_t>(piece.tokens.size());
    learned += piece.learned.empty() ? static_cast<int64_t>(piece.tokens.size())
                                     : std::count(piece.learned.begin(), piece.learned.end(), 1);
  });
  fmt::print("{}\n{}: {}, {} of text\n", printable(path == kStandardInput ? "standard input" : path),
             jsonl ? "JSONL" : "text", counted(documents, "document"), counted(bytes, "byte"));
  if (learned < tokens)
    fmt::print("loss mask: {:.2f}% of the bytes are learned\n",
               100.0 * static_cast<double>(learned) / static_cast<double>(tokens));
}

void inspect(const std::string& path, TextFormat format) {
  if (fs::is_directory(path)) return inspect_folder(path);
  if (is_index(path)) return inspect_index(path);
  if (!is_stream(path) && is_safetensors(path)) return inspect_safetensors(path);
  if (is_stream(path)) return inspect_text(path, format);
  switch (content_of(path, format)) {
    case Content::shard:
      return inspect_shard(path);
    case Content::jsonl:
      return inspect_text(path, TextFormat::jsonl);
    case Content::text:
      return inspect_text(path, TextFormat::text);
  }
}

}  // namespace

void add_inspect(CLI::App& app) {
  struct Options {
    std::string path;
    TextFormat format = TextFormat::automatic;
  };
  auto o = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("inspect", "print the contents of a checkpoint, a safetensors file, token shards or text");
  verb->add_option("path", o->path,
                   "a checkpoint, a run's folder, a model folder of Hugging Face's transformers, a folder of token "
                   "shards, or a file; -: standard input")
      ->required();
  add_format(*verb, o->format);
  verb->callback([o] { inspect(o->path, o->format); });
}

}  // namespace triad
