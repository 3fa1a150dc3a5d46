// triad export: writes a checkpoint's model as a folder for Hugging Face's transformers, or as one whole Triad
// checkpoint. The tensors are copied one at a time, so that host memory holds the largest tensor and not the model.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/text.h"
#include "io/chat/chat_format.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "tools/huggingface/code.h"
#include "tools/huggingface/model_card.h"
#include "tools/huggingface/model_files.h"
#include "tools/huggingface/tokenizer_files.h"
#include "tools/huggingface/weights.h"
#include "tools/options.h"
#include "tools/output_folder.h"
#include "tools/verbs.h"
#include "train/checkpoint/adapted_weights.h"
#include "train/checkpoint/peft_adapter.h"
#include "train/config/load_config.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

struct ExportOptions {
  std::string checkpoint, out, format = "hf", dtype;
  double file_gb = 5;
  bool splits = false;   // --file-gb is given
  bool adapter = false;  // the adapters alone
};

// What is exported: a checkpoint whose tensors have its config's names and shapes; with adapters, merged.
struct Export {
  ModelSource source;
  std::unique_ptr<Tokenizer> tokenizer;
  ModelWeights weights;
  std::vector<ParamSpec> specs;

  explicit Export(const std::string& checkpoint)
      : source(find_model(checkpoint)),
        tokenizer(tokenizer_of_checkpoint(source.folder, source.config.data.tokenizer)),
        weights(source),
        specs(weights.specs()) {
    std::set<std::string_view> expected;
    for (const ParamSpec& spec : specs) {
      expected.insert(spec.name);
      const auto [index, name] = weights.place_of(spec);
      const TensorEntry& entry = index->at(name);
      const std::vector<int64_t> shape(spec.shape.dim.begin(), spec.shape.dim.begin() + spec.shape.rank);
      TRIAD_CHECK(entry.shape == shape, "{}: tensor {} is {}, but the model's is {}", index->file_of(name).path(),
                  entry.name, entry.str(), spec.shape.str());
    }
    if (!weights.merges())
      weights.own().for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
        TRIAD_CHECK(expected.contains(entry.name), "{}: tensor {} is none of this model's", file.path(),
                    shortened(entry.name));
      });
    const int64_t vocab = source.config.model.vocab_size;
    TRIAD_CHECK(tokenizer->vocab_size() <= vocab, "{}: the tokenizer {} has {} tokens, but model.vocab_size is {}",
                source.folder, tokenizer->name(), tokenizer->vocab_size(), vocab);
  }

  // The tensors under the names that name(spec.name) gives.
  template <class F>
  std::vector<ExportedTensor> tensors(F&& name) const {
    std::vector<ExportedTensor> all;
    for (const ParamSpec& spec : specs) {
      const auto [index, in_file] = weights.place_of(spec);
      all.push_back({&index->file_of(in_file), &index->at(in_file), name(spec.name), spec.shape,
                     [&](std::span<float> values) { weights.add_adapter(spec, 0, values); }});
    }
    return all;
  }
  // The end-of-text token, if it's known what tokens mean.
  std::optional<int64_t> eot() const {
    if (!tokenizer->available()) return std::nullopt;
    return tokenizer->eot();
  }
};

void write_all(const std::string& folder, const std::vector<Tokenizer::File>& files) {
  for (const Tokenizer::File& file : files) write_file_atomically(folder + "/" + file.name, file.content);
}

std::string json_file(const Json& json) { return dump_json(json, 2) + "\n"; }

std::string size_text(const WrittenWeights& written) {
  return fmt::format("{:.1f} MB in {}", static_cast<double>(written.bytes) / 1e6, counted(written.files, "file"));
}

void export_huggingface(const Export& e, DType dtype, int64_t most_bytes, const std::string& out) {
  ModelSource source = e.source;
  source.origin = origin_for_tokens(std::move(source.origin), *e.tokenizer, source.config.data.tokenizer);
  // Only a checkpoint from triad import says that it has done no step.
  const Json figures = figures_of(source.folder);
  const bool trained = !figures.contains("step") || figures["step"] != 0;
  const std::optional<ChatFormat> chat = source.chat.is_null() ? std::nullopt : trained_chat(source);
  const bool lost_template = trained && !chat && remove_chat_template(source.origin);
  const ExportClass c = export_class(source.config.model, source.origin);
  std::vector<Tokenizer::File> tokenizer =
      tokenizer_files(*e.tokenizer, source.origin, c, source.config.train.longest_seq_len());
  Json generation = export_generation_config(source, e.eot());
  if (chat && !tokenizer.empty()) {
    set_chat_template(tokenizer, *chat);
    add_turn_end(generation, *chat, *e.tokenizer);
  }
  std::vector<Tokenizer::File> files = {
      {"config.json", json_file(export_config(source, c, dtype, e.eot()))},
      {"generation_config.json", json_file(generation)},
      {"README.md", model_card(fs::path(out).filename().string(), source, c, dtype, *e.tokenizer, chat)}};
  if (!c.huggingface) {
    files.push_back({"configuration_triad.py", kConfigurationTriad});
    files.push_back({"modeling_triad.py", kModelingTriad});
  }
  WrittenWeights written;
  write_output_folder(out, [&](const std::string& folder) {
    const auto name = [&](const std::string& triad_name) { return exported_name(c, triad_name); };
    written = write_weights(e.tensors(name), dtype, most_bytes, folder);
    write_all(folder, files);
    write_all(folder, tokenizer);
  });
  if (tokenizer.empty())
    fmt::print(stderr, "triad: {} has no tokenizer, so {} has none either\n", e.source.folder, out);
  if (lost_template)
    fmt::print(
        stderr,
        "triad: {} has no chat_template: the imported model's was not used in training, so prompts in its form may "
        "be answered badly (its file is in the folder that was imported)\n",
        out);
  fmt::print("{}: {}, {} tensors, {}, {}\n", out, c.word(), e.specs.size(), name_of(dtype), size_text(written));
  if (!c.huggingface)
    fmt::print("model_type triad, because of {}: from_pretrained needs trust_remote_code=True\n", c.reason);
}

// A number from figures_of(); 0 if it is not known.
int64_t count_in(const Json& figures, const char* key) {
  return figures.contains(key) && figures[key].is_number_unsigned() ? figures[key].get<int64_t>() : 0;
}

// A checkpoint as `triad init` writes one. state.json keeps the step, the tokens, the config and the origin.
void export_triad(const Export& e, DType dtype, const std::string& out) {
  const std::string state = e.source.folder + "/" + kStateFile;
  const Json figures = figures_of(e.source.folder);
  RunState reached;
  reached.step = count_in(figures, "step");
  reached.tokens = count_in(figures, "tokens");
  reached.origin = e.source.origin;
  Json json = fs::exists(state) ? read_json_file(state) : state_json(e.source.config, reached);
  json.erase("files");  // checksums for the checkpoint's folder (checksums_of_files)
  json.erase("base");
  if (json.contains("config")) json["config"]["train"]["lora"] = nullptr;  // its adapters are merged
  WrittenWeights written;
  write_output_folder(out, [&](const std::string& folder) {
    written = write_weights(e.tensors([](const std::string& name) { return name; }), dtype,
                            std::numeric_limits<int64_t>::max(), folder);
    write_tokenizer_files(e.tokenizer->files(), folder);
    write_file_atomically(folder + "/" + kStateFile, json_file(json));
  });
  fmt::print("{}: a Triad checkpoint, {} tensors, {}, {}\n", out, e.specs.size(), name_of(dtype), size_text(written));
}

// The adapters alone, as a folder of PEFT.
void export_adapter(const Export& e, DType dtype, const std::string& out) {
  const ModelConfig& model = e.source.config.model;
  const std::optional<LoraConfig>& lora = e.source.config.train.lora;
  if (!lora)
    fail("--adapter: {} has no adapters (train.lora): without --adapter the whole model is exported", e.source.weights);
  const ExportClass c = export_class(model, e.source.origin);
  if (!c.huggingface)
    fail(
        "--adapter: {}: PEFT's folder is for a model of transformers' own classes, and this one has {}: without "
        "--adapter the merged model is exported",
        e.source.weights, c.reason);
  if (!computes_as_imported(e.source, c))
    fail(
        "--adapter: {}: the imported model, to which PEFT adds the adapters, computes something else, because a key "
        "such "
        "as model.rope_theta or model.nope_layers was changed: without --adapter the merged model is exported",
        e.source.weights);
  std::vector<ExportedTensor> tensors;
  const WeightIndex& own = e.weights.own();
  for (const ParamSpec& spec : trained_specs(model, lora))
    tensors.push_back({&own.file_of(spec.name), &own.at(spec.name), peft_tensor_name(spec), spec.shape});
  const Json imported = e.source.origin.is_null() ? Json() : e.source.origin.value("config", Json());
  const Json base = imported.is_object() ? imported.value("_name_or_path", Json()) : Json();
  WrittenWeights written;
  write_output_folder(out, [&](const std::string& folder) {
    written = write_weights(tensors, dtype, std::numeric_limits<int64_t>::max(), folder, "adapter_model");
    write_file_atomically(folder + "/" + kPeftConfig, json_file(peft_config(model, *lora, base)));
  });
  fmt::print("{}: adapters of rank {} for PEFT, {} tensors, {}, {}\n", out, lora->rank, tensors.size(), name_of(dtype),
             size_text(written));
}

void run_export(const ExportOptions& o) {
  check_environment();
  const bool triad = o.format == "triad";
  if (!triad && o.format != "hf") fail_usage("--format is \"{}\": hf or triad is allowed", shortened(o.format));
  if (o.adapter && (triad || o.splits))
    fail_usage("--adapter: it writes one file for PEFT, and takes neither --format triad nor --file-gb");
  if (triad && o.splits) fail_usage("--file-gb is {}: --format triad writes one whole file of weights", o.file_gb);
  if (!o.dtype.empty() && o.dtype != "bf16" && o.dtype != "f32")
    fail_usage("--dtype is \"{}\": bf16 or f32 is allowed", shortened(o.dtype));
  const DType dtype = o.dtype == "f32" || (o.dtype.empty() && (triad || o.adapter)) ? DType::f32 : DType::bf16;
  if (fs::exists(o.checkpoint)) check_output_folder(o.out, o.checkpoint);
  const Export e(o.checkpoint);
  const std::string out = check_output_folder(o.out, e.source.folder);
  if (triad) return export_triad(e, dtype, out);
  if (o.adapter) return export_adapter(e, dtype, out);
  constexpr double kGB = 1e9;
  export_huggingface(e, dtype, static_cast<int64_t>(o.file_gb * kGB), out);
}

}  // namespace

void add_export(CLI::App& app) {
  auto o = std::make_shared<ExportOptions>();
  CLI::App* verb = app.add_subcommand("export", "write a model for transformers, vLLM and llama.cpp's converter");
  verb->add_option("CHECKPOINT", o->checkpoint, "a checkpoint, a run's folder, or a file of weights in one")
      ->required();
  verb->add_option("--out", o->out, "folder to write; it must not exist, or be empty")->required();
  verb->add_option(
          "--format", o->format,
          "hf: for Hugging Face's transformers, as the class from which the model was imported, as Llama, "
          "Qwen2, Qwen3 or SmolLM3, or with code of its own; triad: a checkpoint with one whole file of weights")
      ->capture_default_str();
  verb->add_option("--dtype", o->dtype,
                   "bf16 or f32, which keeps every bit; default: bf16, for format triad and --adapter f32");
  verb->add_flag(
      "--adapter", o->adapter,
      "of a run with train.lora the adapters alone, as a folder of PEFT; without it they are merged into the "
      "weights");
  const CLI::Option* const file_gb =
      verb->add_option("--file-gb", o->file_gb, "format hf: weights are split into files of at most this many GB")
          ->check(within(above(0).up_to(1e6)))
          ->capture_default_str();
  verb->callback([o, file_gb] {
    o->splits = file_gb->count() > 0;
    run_export(*o);
  });
}

}  // namespace triad
