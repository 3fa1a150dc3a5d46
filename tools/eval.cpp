// triad eval: computes a checkpoint's loss on text, JSONL or token shards, in all and by position, and with --against
// its difference from another checkpoint's. Every token is predicted once, except the first and those that a loss mask
// excludes. io/data/text_format.h decides what a file holds; gzip and zstd are decompressed. With --needle: how often a
// model that was trained on data.kind needle answers a task from its prompt (tools/eval_needle.h).
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <numbers>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "io/data/dataset.h"
#include "io/data/document_losses.h"
#include "io/data/position_losses.h"
#include "io/data/shard_manifest.h"
#include "io/data/shards.h"
#include "io/file.h"
#include "kernels/step/reduce.h"
#include "tools/eval_needle.h"
#include "tools/options.h"
#include "tools/output_folder.h"
#include "tools/verbs.h"
#include "tools/work_progress.h"
#include "train/config/load_config.h"
#include "train/inference.h"
#include "train/run/data_source.h"

namespace triad {

namespace {

struct Options {
  std::string checkpoint, device = "auto", dtype = "f32";
  std::vector<std::string> data;
  TextFormat format = TextFormat::automatic;
  int64_t batch = 8, seq = 0, batches = 0;
  bool json = false;
  std::string per_document, per_position, against;
  bool sparse_layers = false;
  bool needle = false;
  std::vector<int64_t> lengths;  // this and the next options belong to --needle
  std::vector<double> depths = {0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1};
  int64_t samples = 64;
  std::string out, task;
};

struct Total {
  double loss = 0;
  int64_t positions = 0;  // targets whose loss was added
  int64_t bytes = 0;      // the targets' text length, bytes; an end-of-text token has none
  double seconds = 0;
};

// Sums the loss over consecutive rows of T tokens, B at a time. Positions that are missing at the end, or whose next
// token the mask excludes, have target -1 and do not count. bytes_by: the tokens' tokenizer, or null if unknown.
// most_batches: computes only this many batches; 0: all. within: whether attention stays within documents. Each
// prediction's loss is added to by_position, and to losses, which is null if it is not known where documents begin.
Total evaluate(LoadedModel& loaded, const TokenSource& source, const Tokenizer* bytes_by, int64_t most_batches,
               bool within, PositionLosses& by_position, DocumentLosses* losses) {
  const int64_t B = loaded.activations().B(), T = loaded.activations().T();
  const int64_t all = source.size() - 1, all_batches = (all + B * T - 1) / (B * T);
  const int64_t batches = most_batches > 0 ? std::min(most_batches, all_batches) : all_batches;
  const int64_t targets = std::min(all, batches * B * T);
  Total total;
  WorkProgress progress("eval", "batches", batches);
  for (int64_t begin = 0; begin < targets; begin += B * T) {
    const int64_t n = std::min(B * T, targets - begin);
    std::vector<int32_t> read(static_cast<size_t>(n + 1));
    source.read(begin, read);
    std::vector<int32_t> tokens(read.begin(), read.end() - 1), next(read.begin() + 1, read.end());
    apply_mask(source.mask(), begin + 1, next);
    if (bytes_by != nullptr) {
      std::vector<int32_t> text = next;  // the first token is not a target, so its bytes do not count
      std::erase_if(text, [&](int32_t token) { return token < 0 || token == bytes_by->eot(); });
      total.bytes += static_cast<int64_t>(bytes_by->decode(text).size());
    }
    tokens.resize(static_cast<size_t>(B * T), 0);
    next.resize(static_cast<size_t>(B * T), -1);
    if (within) {
      const DocumentIndex& index = require_documents(source);
      loaded.set_documents(bounds_of_rows(index, begin, n, B, T));
      if (index.separator == Separator::last)
        for (const int64_t at : index.begins_in(begin + 1, begin + n + 1)) next[at - begin - 1] = -1;
    }
    loaded.set_tokens(tokens, next);
    loaded.model().forward(loaded.ctx(), loaded.activations());
    loaded.model().loss(loaded.ctx(), loaded.activations());
    const std::vector<double> row_loss = read_floats(loaded.ctx(), loaded.activations().row_loss);
    for (int64_t i = 0; i < n; ++i) {
      if (next[i] < 0) continue;
      total.loss += row_loss[i];
      ++total.positions;
      by_position.add(begin + i, row_loss[i]);
      if (losses != nullptr) losses->add(begin + i, row_loss[i]);
    }
    progress.show(begin / (B * T) + 1, total.positions);
  }
  total.seconds = progress.seconds();
  return total;
}

// Whether the tokens are known to come from the checkpoint's tokenizer, so that bits per byte can be computed. Text:
// always. Shards with a manifest: yes; throws an Error if the manifest names another tokenizer. Shards without a
// manifest: if their folders hold files equal to the tokenizer's. The byte tokenizer has no files: if the model's
// vocabulary is 256.
bool tokens_are_known(const Options& o, const LoadedModel& loaded, const Tokenizer& tokenizer) {
  const std::vector<std::string> paths = expand_globs(o.data);
  if (!is_shard(paths.front())) return true;
  const std::vector<Tokenizer::File> files = tokenizer.files();
  const std::string& name = loaded.config().data.tokenizer;
  const bool named = (!name.empty() && name != kNoTokenizer) || !files.empty();
  const ShardOrigin origin = find_manifests(paths);
  for (const ShardManifest& manifest : origin.manifests)
    if (named && !manifest.is_of(tokenizer))
      fail("{} lists shards of the tokenizer {}, but that of the checkpoint {} is {}: its tokens mean something else",
           manifest.path, manifest.tokenizer, o.checkpoint, tokenizer.name());
  if (files.empty()) return named && (origin.unlisted.empty() || loaded.config().model.vocab_size == 256);
  for (const std::string& path : origin.unlisted)
    for (const Tokenizer::File& file : files) {
      const std::filesystem::path sibling = std::filesystem::path(path).parent_path() / file.name;
      if (!std::filesystem::is_regular_file(sibling) || read_file(sibling.string()) != file.content) return false;
    }
  return true;
}

// The most documents in a T-token row of the source, the last row's empty rest included; 0 if the run that wrote the
// checkpoint lets attention cross documents. If the checkpoint doesn't say, attention stays within documents if they
// are known.
int64_t most_documents(const Options& o, const Config& config, const TokenSource& source) {
  const bool unset = config.data.documents == DocumentScope::unset;  // `triad init`, which doesn't open the data
  if (unset ? source.documents() == nullptr : !attends_within(config.data)) return 0;
  if (source.documents() == nullptr)
    fail(
        "{} was trained with data.documents attend_within, but where the documents of {} begin is not known: no "
        "manifest.json lists all of its shards and names their separator as `eot` (io/data/README.md)",
        o.checkpoint, source.name());
  const int64_t T = o.seq > 0 ? o.seq : config.train.longest_seq_len();
  return divide_rows(*source.documents(), (source.size() + T - 1) / T, T).most + 1;
}

// A model's losses on all the source's tokens, or on the first o.batches batches.
struct Losses {
  Total total;
  int64_t seq_len = 0;  // tokens per row
  bool within = false;  // attention stays within documents
  PositionLosses by_position;
  std::optional<DocumentLosses> by_document;
  double mean() const { return total.loss / static_cast<double>(total.positions); }
};

// begun: as LoadedModel::Options::begun.
Losses evaluate(const Options& o, const ModelSource& model, const Tokenizer& tokenizer, const TokenSource& source,
                const std::optional<ModelConfig>& begun = {}) {
  const int64_t most = most_documents(o, model.config, source);
  LoadedModel loaded({.checkpoint = o.checkpoint,
                      .device = parse_device(o.device),
                      .dtype = parse_dtype(o.dtype),
                      .batch = o.batch,
                      .seq_len = o.seq,
                      .most_documents = most,
                      .begun = begun});
  const int64_t T = loaded.activations().T();
  Losses losses{.total = {},
                .seq_len = T,
                .within = most > 0,
                .by_position = {T, most > 0 ? source.documents() : nullptr},
                .by_document = {}};
  if (source.documents() != nullptr) losses.by_document.emplace(*source.documents(), T);
  losses.total = evaluate(loaded, source, tokens_are_known(o, loaded, tokenizer) ? &tokenizer : nullptr, o.batches,
                          losses.within, losses.by_position, losses.by_document ? &*losses.by_document : nullptr);
  TRIAD_CHECK(losses.total.positions > 0, "{}: the loss mask leaves no token that is learned", source.name());
  TRIAD_CHECK(std::isfinite(losses.mean()), "{}: the loss on {} is {}: weights that are not finite?", o.checkpoint,
              source.name(), losses.mean());
  return losses;
}

bool same_tokenizer(const Tokenizer& a, const Tokenizer& b) {
  const auto equal = [](const Tokenizer::File& x, const Tokenizer::File& y) {
    return x.name == y.name && x.content == y.content;
  };
  const std::vector<Tokenizer::File> x = a.files(), y = b.files();
  return x.empty() && y.empty() ? a.name() == b.name() : std::equal(x.begin(), x.end(), y.begin(), y.end(), equal);
}

// Throws an Error if losses of --against's model can't be compared with `model`'s.
void check_against(const Options& o, const ModelSource& model, const Tokenizer& tokenizer, const ModelSource& other,
                   const TokenSource& source) {
  const auto other_tokenizer = tokenizer_of_checkpoint(other.folder, other.config.data.tokenizer);
  if (!same_tokenizer(tokenizer, *other_tokenizer))
    fail("--against {}: its tokenizer is {}, and that of {} is {}: the same tokens mean different texts", o.against,
         other_tokenizer->name(), o.checkpoint, tokenizer.name());
  const auto scope = [&](const ModelSource& m) {
    return most_documents(o, m.config, source) > 0 ? "attend_within" : "attend_across";
  };
  if (const std::string_view ours = scope(model), its = scope(other); ours != its)
    fail("--against {}: its data.documents is {}, and that of {} is {}: their predictions do not have the same context",
         o.against, its, o.checkpoint, ours);
}

// A dense model with NSA in one layer alone.
ModelConfig with_sparse_layer(ModelConfig config, int64_t layer) {
  const auto range = [](int64_t begin, int64_t end) { return begin < end ? fmt::format("{}:{}", begin, end) : ""; };
  const std::string before = range(0, layer), after = range(layer + 1, config.n_layers);
  config.attention = AttentionKind::nsa;
  config.dense_layers = before + (before.empty() || after.empty() ? "" : ",") + after;
  config.resolve();
  return config;
}

// The mean loss with NSA in one layer alone.
struct SparseLayer {
  int64_t layer = 0;
  double loss = 0;
};
// By loss, the largest first.
std::vector<SparseLayer> evaluate_sparse_layers(const Options& o, const ModelSource& model, const Tokenizer& tokenizer,
                                                const TokenSource& source) {
  std::vector<SparseLayer> layers;
  for (int64_t i = 0; i < model.config.model.n_layers; ++i)
    layers.push_back({i, evaluate(o, model, tokenizer, source, with_sparse_layer(model.config.model, i)).mean()});
  std::stable_sort(layers.begin(), layers.end(),
                   [](const SparseLayer& a, const SparseLayer& b) { return a.loss > b.loss; });
  return layers;
}

Json json_of(const Options& o, const Losses& losses, double bits_per_byte, const Losses* other) {
  const Total& total = losses.total;
  Json result = {{"loss", losses.mean()},
                 {"ppl", std::exp(losses.mean())},
                 {"bits_per_byte", bits_per_byte},
                 {"positions", total.positions},
                 {"seconds", total.seconds},
                 {"tokens_per_s", static_cast<double>(total.positions) / total.seconds},
                 {"by_position", losses.by_position.json(other == nullptr ? nullptr : &other->by_position)}};
  if (losses.by_document) result["by_document"] = losses.by_document->json();
  if (other == nullptr) return result;
  const PositionLosses::Difference d = losses.by_position.minus(other->by_position);
  result["against"] = {{"checkpoint", o.against},
                       {"loss", other->mean()},
                       {"difference", d.mean},
                       {"standard_error", d.standard_error},
                       {"rows", d.rows}};
  return result;
}

// Throws a UsageError if --per-document and --per-position are one file, which need not exist.
void check_distinct_files(const Options& o) {
  if (o.per_document.empty() || o.per_position.empty()) return;
  const auto file = [](const std::string& path) {
    std::error_code unknown;
    return std::filesystem::weakly_canonical(std::filesystem::absolute(path), unknown);
  };
  if (file(o.per_document) == file(o.per_position))
    fail_usage("--per-document {} and --per-position {} are the same file: each table needs its own", o.per_document,
               o.per_position);
}

void eval(const Options& o) {
  check_environment();
  check_distinct_files(o);
  const ModelSource model = find_model(o.checkpoint);
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_of_checkpoint(model.folder, model.config.data.tokenizer);
  std::optional<ModelSource> other_model;
  if (!o.against.empty()) other_model = find_model(o.against);
  int64_t vocab_size = model.config.model.vocab_size;
  if (other_model) vocab_size = std::min(vocab_size, other_model->config.model.vocab_size);
  const std::shared_ptr<const TokenSource> source = open_tokens(o.data, *tokenizer, vocab_size, o.format);
  if (const std::string warning = source->warning(); !warning.empty())
    fmt::print(stderr, "triad: warning: {}\n", warning);
  TRIAD_CHECK(source->size() >= 2, "{} holds {} tokens: at least 2 are needed", source->name(), source->size());
  if (!o.per_document.empty() && source->documents() == nullptr)
    fail(
        "--per-document {}: where the documents of {} begin is not known: no manifest.json lists all of its shards and "
        "names their separator as `eot` (io/data/README.md)",
        o.per_document, source->name());
  // Everything that can be wrong is found before the evaluation, which may take hours.
  if (other_model) check_against(o, model, *tokenizer, *other_model, *source);
  if (o.sparse_layers) {
    if (model.config.model.has_nsa())
      fail_usage("--sparse-layers: {} has NSA: a model whose layers are all dense is needed", o.checkpoint);
    with_sparse_layer(model.config.model, 0);  // its shape may be impossible for NSA
  }
  if (!o.per_document.empty()) check_output_file("--per-document", o.per_document);
  if (!o.per_position.empty()) check_output_file("--per-position", o.per_position);

  const Losses losses = evaluate(o, model, *tokenizer, *source);
  std::optional<Losses> against;
  if (other_model) {
    Options other_options = o;
    other_options.checkpoint = o.against, other_options.seq = losses.seq_len;
    against.emplace(evaluate(other_options, *other_model, *tokenizer, *source));
  }
  std::vector<SparseLayer> sparse_layers;
  if (o.sparse_layers) sparse_layers = evaluate_sparse_layers(o, model, *tokenizer, *source);
  const Losses* const other = against ? &*against : nullptr;
  const double loss = losses.mean();
  if (!o.per_document.empty()) write_file_atomically(o.per_document, losses.by_document->csv());
  if (!o.per_position.empty()) write_file_atomically(o.per_position, losses.by_position.csv());
  // Bits per byte. End-of-text tokens contribute bits although they have no bytes. NaN (null in JSON) if the byte count
  // is unknown.
  const Total& total = losses.total;
  const bool has_bytes = total.bytes > 0;
  const double bits_per_byte = has_bytes ? total.loss / std::numbers::ln2 / static_cast<double>(total.bytes) : NAN;
  if (o.json) {
    Json result = json_of(o, losses, bits_per_byte, other);
    for (const SparseLayer& s : sparse_layers)
      result["sparse_layers"].push_back({{"layer", s.layer}, {"loss", s.loss}});
    return fmt::print("{}\n", dump_json(result, -1));
  }
  fmt::print("{}: {}, loss {:.4f}, perplexity {:.3f}{}\n", source->name(), counted(total.positions, "position"), loss,
             std::exp(loss), has_bytes ? fmt::format(", bits per byte {:.4f}", bits_per_byte) : "");
  if (other != nullptr) {
    const PositionLosses::Difference d = losses.by_position.minus(other->by_position);
    fmt::print("against {}: loss {:.4f}, difference {:+.4f}, standard error {:.4f} from {}\n", o.against, other->mean(),
               d.mean, d.standard_error, counted(d.rows, "row"));
  }
  if (other != nullptr || losses.by_position.ranges() > 1)
    fmt::print("{}", losses.by_position.table(other == nullptr ? nullptr : &other->by_position));
  if (losses.by_document) fmt::print("{}", losses.by_document->table());
  if (!sparse_layers.empty()) fmt::print("{:>12}  {:>8}  {:>10}\n", "sparse layer", "loss", "difference");
  for (const SparseLayer& s : sparse_layers)
    fmt::print("{:>12}  {:>8.4f}  {:>+10.4f}\n", s.layer, s.loss, s.loss - loss);
}

// Adds --needle and its options; returns --needle.
CLI::Option* add_needle_options(CLI::App& verb, Options& o) {
  CLI::Option* needle =
      verb.add_flag("--needle", o.needle,
                    "instead of the loss: how often a model trained on data.kind needle answers from its context");
  std::vector<std::string> tasks;
  for (const auto& [word, kind] : EnumWords<NeedleKind>::words) tasks.emplace_back(word);
  verb.add_option("--task", o.task, "for --needle: the task, as data.needle_task (default: that of the run)")
      ->check(CLI::IsMember(tasks))
      ->needs(needle);
  verb.add_option("--lengths", o.lengths,
                  "for --needle: sequence lengths in tokens (default: 1/8, 1/4, 1/2 and all of the training length, "
                  "without those too short for the task)")
      ->check(within(at_least(1).up_to(kMaxSeqLen)))
      ->delimiter(',')
      ->needs(needle);
  verb.add_option("--depths", o.depths,
                  "for --needle: positions of the needle in the sequence, 0 the beginning, 1 the end")
      ->check(within(at_least(0).up_to(1)))
      ->delimiter(',')
      ->capture_default_str()
      ->needs(needle);
  verb.add_option("--samples", o.samples, "for --needle: sequences for each length and depth")
      ->check(within(at_least(1).up_to(kMaxBatch)))
      ->capture_default_str()
      ->needs(needle);
  verb.add_option(
          "--out", o.out,
          "for --needle: folder of needle.csv and needle.svg, of tasks other than keys needle_TASK.csv and .svg "
          "(default: the run's or checkpoint's)")
      ->needs(needle);
  return needle;
}

}  // namespace

void add_eval(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("eval", "loss, perplexity and bits per byte on text or shards; with --needle, recall");
  verb->add_option("--checkpoint", o->checkpoint, "a checkpoint, or a run's folder")->required();
  CLI::Option* data = verb->add_option("--data", o->data,
                                       "text, JSONL or token shards: files or globs; gzip and zstd are decompressed");
  CLI::Option* needle = add_needle_options(*verb, *o);
  needle->excludes(data);
  needle->excludes(add_format(*verb, o->format));
  CLI::Option* seq = verb->add_option("--seq", o->seq, "tokens of a sequence; 0: the training length")
                         ->check(within(at_least(0).up_to(kMaxSeqLen)))
                         ->capture_default_str();
  needle->excludes(seq);
  verb->add_option("--batch", o->batch, "sequences that run together")
      ->check(within(at_least(1).up_to(kMaxBatch)))
      ->capture_default_str();
  CLI::Option* batches =
      verb->add_option("--batches", o->batches, "evaluate only this many batches from the beginning; 0: all")
          ->check(within(at_least(0).up_to(kMaxInteger)))
          ->capture_default_str();
  needle->excludes(batches);
  verb->add_option("--device", o->device, "auto, cpu or cuda")->capture_default_str();
  verb->add_option("--dtype", o->dtype, "f64, f32 or bf16")->capture_default_str();
  CLI::Option* per_document =
      verb->add_option("--per-document", o->per_document,
                       "also write a CSV file with a row for each document: number, first token, tokens, positions, "
                       "loss, perplexity")
          ->check(named());
  needle->excludes(per_document);
  CLI::Option* per_position =
      verb->add_option("--per-position", o->per_position,
                       "also write a CSV file with the loss by position; as positions.csv in the run's folder, triad "
                       "report draws it")
          ->check(named());
  needle->excludes(per_position);
  CLI::Option* against =
      verb->add_option(
              "--against", o->against,
              "also evaluate this checkpoint, or run's folder, on the same tokens, and print the difference of "
              "the losses (--checkpoint minus this) with its standard error, in all and by position")
          ->check(named());
  needle->excludes(against);
  CLI::Option* sparse_layers =
      verb->add_flag("--sparse-layers", o->sparse_layers,
                     "of a dense model: also the loss with NSA in one layer alone, before any training, for each "
                     "layer. Those that lose most are best kept dense (model.dense_layers) in a run that begins with "
                     "these weights (train.init_from)");
  needle->excludes(sparse_layers);
  verb->add_flag("--json", o->json, "print one JSON object");
  verb->callback([o] {
    if (o->data.empty() && !o->needle) fail_usage("eval: --data or --needle is required");
    if (!o->needle) return eval(*o);
    check_environment();
    eval_needle({.checkpoint = o->checkpoint,
                 .device = o->device,
                 .dtype = o->dtype,
                 .out = o->out,
                 .task = o->task,
                 .questions = {.lengths = o->lengths, .depths = o->depths, .samples = o->samples, .batch = o->batch},
                 .json = o->json});
  });
}

}  // namespace triad
