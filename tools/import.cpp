// triad import: turns a Hugging Face transformers model folder into a checkpoint. The tensors are copied one at a time,
// from one file after the other, so that host memory holds the largest tensor and not the model.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <chrono>
#include <map>
#include <memory>
#include <utility>

#include "engine/check.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "io/huggingface/tensor_names.h"
#include "model/from_dense.h"
#include "tools/import_source.h"
#include "tools/output_folder.h"
#include "tools/verbs.h"
#include "tools/work_progress.h"
#include "train/checkpoint/state.h"
#include "train/config/load_config.h"

namespace triad {

namespace {

struct ImportOptions {
  std::string folder, out, attention;
  std::vector<std::string> sets;
  bool no_tokenizer = false;
};

// The first element that is NaN or infinite, as text, with its index; empty if all are finite.
template <class T>
std::string first_not_finite(std::span<const std::byte> bytes) {
  // Tests the exponent's bits, which is faster than a conversion to float.
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  constexpr Bits kExponent = std::is_same_v<T, _Float16> ? 0x7c00 : std::is_same_v<T, bf16> ? 0x7f80 : 0x7f800000;
  const Bits* const bits = reinterpret_cast<const Bits*>(bytes.data());
  const size_t n = bytes.size() / sizeof(T);
  constexpr size_t kBlock = 4096;  // elements tested without a branch, so that the loop is vectorized
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t end = std::min(n, begin + kBlock);
    int bad = 0;
    for (size_t i = begin; i < end; ++i) bad |= (bits[i] & kExponent) == kExponent;
    if (bad == 0) continue;
    for (size_t i = begin; i < end; ++i)
      if ((bits[i] & kExponent) == kExponent)
        return fmt::format("{} at index {}", static_cast<float>(std::bit_cast<T>(bits[i])), i);
  }
  return "";
}

// A tensor from the folder in memory: F16 as F32, because Triad has no F16; BF16 and F32 as they are.
class TensorBytes {
 public:
  void read(const SafetensorsFile& file, const TensorEntry& entry) {
    bytes_.resize(static_cast<size_t>(entry.bytes()));
    file.read(entry, bytes_);
    const std::string bad = entry.dtype == "F16"    ? first_not_finite<_Float16>(bytes_)
                            : entry.dtype == "BF16" ? first_not_finite<bf16>(bytes_)
                                                    : first_not_finite<float>(bytes_);
    TRIAD_CHECK(bad.empty(), "{}: tensor {} holds {}: finite weights are needed", file.path(), entry.name, bad);
    if (entry.dtype != "F16") return;
    const auto* const half = reinterpret_cast<const _Float16*>(bytes_.data());
    std::vector<std::byte> wide(2 * bytes_.size());
    auto* const to = reinterpret_cast<float*>(wide.data());
    for (size_t i = 0; i < bytes_.size() / 2; ++i) to[i] = static_cast<float>(half[i]);
    bytes_ = std::move(wide);
  }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

DType stored_dtype(const TensorEntry& entry) { return entry.dtype == "BF16" ? DType::bf16 : DType::f32; }

// Writes `config`'s weights to a file: each tensor in the folder to all parameters that begin with it, then the
// parameters that the folder does not have.
class WeightsCopy {
 public:
  WeightsCopy(const ImportSource& source, const Config& config)
      : source_(source), config_(config), specs_(param_specs(config.model)) {
    for (size_t i = 0; i < specs_.size(); ++i) {
      // A model that has NSA already has each tensor of its own.
      const std::string from = source.config.nsa.is_null() ? dense_source(specs_[i]) : specs_[i].name;
      if (from.empty())
        fresh_.push_back(i);
      else
        targets_[source.tensor_name(from)].push_back(i);
    }
  }

  void write(const std::string& path) {
    std::vector<TensorSpec> tensors;
    for (const size_t i : fresh_) tensors.push_back({specs_[i].name, DType::f32, specs_[i].shape});
    int64_t total = 0;
    for (const auto& [name, targets] : targets_)
      for (const size_t i : targets)
        tensors.push_back({specs_[i].name, stored_dtype(*source_.weights.find(name)), specs_[i].shape});
    source_.weights.for_each([&](const SafetensorsFile&, const TensorEntry& entry) { total += entry.bytes(); });
    SafetensorsWriter writer(path, tensors);
    constexpr int64_t kMiB = 1 << 20;
    WorkProgress progress("import", "MiB", total / kMiB);
    int64_t done = 0;
    TensorBytes tensor;
    source_.weights.for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
      copy(writer, tensor, file, entry);
      done += entry.bytes();
      progress.show(done / kMiB);
    });
    write_fresh(writer);
    writer.finish();
  }

  // What begins fresh, for the log; empty if nothing does.
  std::string fresh() const {
    std::vector<ParamSpec> specs;
    for (const size_t i : fresh_) specs.push_back(specs_[i]);
    return describe_fresh(specs);
  }
  size_t count() const { return specs_.size(); }

 private:
  void copy(SafetensorsWriter& writer, TensorBytes& tensor, const SafetensorsFile& file, const TensorEntry& entry) {
    const auto targets = targets_.find(entry.name);
    if (targets == targets_.end()) {
      if (!is_computed_tensor(entry.name)) check_tied(file, entry);
      return;
    }
    tensor.read(file, entry);
    for (const size_t i : targets->second) writer.write(specs_[i].name, tensor.bytes());
  }

  // Compares the head, which a tied model does not use, with the embedding.
  void check_tied(const SafetensorsFile& file, const TensorEntry& head) {
    const std::string embed = source_.tensor_name("embed.weight");
    TensorBytes a, b;
    a.read(file, head);
    b.read(source_.weights.file_of(embed), *source_.weights.find(embed));
    TRIAD_CHECK(std::ranges::equal(a.bytes(), b.bytes()),
                "{}: tensor {} differs from {}, although tie_word_embeddings in config.json is true", file.path(),
                head.name, embed);
  }

  void write_fresh(SafetensorsWriter& writer) {
    Runtime runtime({.device = Device::cpu()});
    for (const size_t i : fresh_) {
      std::vector<float> values(static_cast<size_t>(specs_[i].shape.numel()));
      const Tensor out(reinterpret_cast<std::byte*>(values.data()), DType::f32, {specs_[i].shape.numel()},
                       Device::cpu());
      draw_values(runtime.ctx(), specs_[i], 0, out, static_cast<uint64_t>(config_.train.seed));
      writer.write(specs_[i].name, std::as_bytes(std::span(values)));
    }
  }

  const ImportSource& source_;
  const Config& config_;
  std::vector<ParamSpec> specs_;
  std::vector<size_t> fresh_;                                        // parameters that the folder does not have
  std::map<std::string, std::vector<size_t>, std::less<>> targets_;  // folder's name -> parameters that begin with it
};

std::string describe_import(const Tokenizer& tokenizer) {
  if (!tokenizer.available() || tokenizer.files().empty()) return tokenizer.name();
  return fmt::format("{} tokens in {}", tokenizer.vocab_size(), tokenizer.files().front().name);
}

void run_import(const ImportOptions& o) {
  check_environment();
  const auto begin = std::chrono::steady_clock::now();
  std::optional<AttentionKind> attention;
  if (o.attention == "dense")
    attention = AttentionKind::dense;
  else if (o.attention == "nsa")
    attention = AttentionKind::nsa;
  else if (!o.attention.empty())
    fail_usage("--attention is \"{}\": dense or nsa is allowed", shortened(o.attention));
  const std::string out = check_output_folder(o.out, o.folder);
  const ImportSource source = open_import(o.folder, !o.no_tokenizer);
  Config config = config_of_import(source, {.attention = attention, .sets = o.sets, .out = out});
  if (!source.tokenizer->available())
    fmt::print(stderr,
               "triad: {}: {}, so the checkpoint knows tokens, but no texts: generate takes --prompt-ids (put its "
               "tokenizer.json into {} to use texts)\n",
               o.folder, o.no_tokenizer ? "its tokenizer is left out" : "it holds no tokenizer.json", o.out);
  WeightsCopy copy(source, config);
  write_output_folder(out, [&](const std::string& folder) {
    copy.write(folder + "/model.safetensors");
    write_tokenizer_files(source.tokenizer->files(), folder);
    write_file_atomically(folder + "/config.json", dump_json(config_to_json(config), 2) + "\n");
    config.train.init_from.clear();
    RunState untrained;
    untrained.origin = source.origin;
    write_file_atomically(folder + "/" + kStateFile, dump_json(state_json(config, untrained), 2) + "\n");
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  fmt::print("{}: {} of {}, {} attention, {} parameters in {} tensors{}; tokenizer: {}; {:.1f} s\n", o.out,
             word_of(source.config.model_class), source.dtypes(), word_of(config.model.attention),
             count_parameters(config.model), copy.count(), copy.fresh().empty() ? "" : ", " + copy.fresh(),
             describe_import(*source.tokenizer), seconds.count());
  const bool texts = source.tokenizer->available();  // only tokens can be read without a tokenizer
  fmt::print("train it: triad train {}/config.json --set data.kind={} --set 'data.paths=[\"my/*.{}\"]'\n", o.out,
             texts ? "text" : "shards", texts ? "txt" : "bin");
}

}  // namespace

void add_import(CLI::App& app) {
  auto o = std::make_shared<ImportOptions>();
  CLI::App* verb = app.add_subcommand("import", "make a checkpoint of a model folder of Hugging Face's transformers");
  verb->add_option("DIR", o->folder, "a folder with config.json and model.safetensors, or several and their index")
      ->required();
  verb->add_option("--out", o->out, "folder to write; it must not exist, or be empty")->required();
  verb->add_option("--attention", o->attention,
                   "dense, as transformers' classes have it; nsa: Native Sparse Attention, whose branches begin with "
                   "the dense keys and values; without this option the model as it is");
  verb->add_option("--set", o->sets, "group.key=value: sets a key of the checkpoint's config, such as nsa.w=1024")
      ->take_all()
      ->expected(1);
  verb->add_flag("--no-tokenizer", o->no_tokenizer, "import the weights without the folder's tokenizer");
  verb->callback([o] { run_import(*o); });
}

}  // namespace triad
