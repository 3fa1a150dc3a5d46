// triad eval: the loss of a checkpoint on text, JSONL or token shards (loss.h), its difference from another's
// (compare.h), the price of sparse layers (sparse_layers.h), or with --needle how often a model answers from its
// context (needle.h). Every token is predicted once, except the first and those that a loss mask excludes.
// io/data/format/text_format.h decides what a file holds; gzip and zstd are decompressed.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/tone.h"
#include "io/chat/chat_format.h"
#include "io/file.h"
#include "io/tokenizer/text_bytes.h"
#include "tools/eval/compare.h"
#include "tools/eval/loss.h"
#include "tools/eval/needle.h"
#include "tools/eval/record.h"
#include "tools/eval/sparse_layers.h"
#include "tools/options.h"
#include "tools/output_folder.h"
#include "tools/verbs.h"
#include "train/config/load_config.h"
#include "train/run/data_source.h"

namespace triad {

namespace {

struct Options {
  LossOptions loss;
  TextFormat format = TextFormat::automatic;
  bool json = false;
  std::string per_document, per_position, against;
  bool sparse_layers = false;
  bool needle = false;
  NeedleQuestions questions = {
      .lengths = {}, .depths = {0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1}, .samples = 64};
  std::string out, task;  // options of --needle, as are the questions
};

Json json_of(const Options& o, const Losses& losses, double bits, const Losses* other) {
  const Total& total = losses.total;
  Json result = {{"loss", losses.mean()},
                 {"ppl", std::exp(losses.mean())},
                 {"bits_per_byte", bits},
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
  const ModelSource model = find_model(o.loss.checkpoint);
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_of_checkpoint(model.folder, model.config.data.tokenizer);
  std::optional<ModelSource> other_model;
  if (!o.against.empty()) other_model = find_model(o.against);
  int64_t vocab_size = model.config.model.vocab_size;
  if (other_model) vocab_size = std::min(vocab_size, other_model->config.model.vocab_size);
  ChatOptions chat{.format = nullptr, .learn = model.config.data.learn};
  if (std::optional<ChatFormat> trained = trained_chat(model))
    chat.format = std::make_shared<const ChatFormat>(std::move(*trained));
  const std::shared_ptr<const TokenSource> source = open_tokens(o.loss.data, *tokenizer, vocab_size, o.format, chat);
  if (const std::string warning = source->warning(); !warning.empty()) print_warning("warning: " + warning);
  TRIAD_CHECK(source->size() >= 2, "{} holds {} tokens: at least 2 are needed", source->name(), source->size());
  if (!o.per_document.empty() && source->documents() == nullptr)
    fail(
        "--per-document {}: where the documents of {} begin is not known: no manifest.json lists all of its shards and "
        "names their separator as `eot` (io/data/README.md)",
        o.per_document, source->name());
  // Everything that can be wrong is found before the evaluation, which may take hours.
  if (other_model) check_against(o.loss, model, *tokenizer, o.against, *other_model, *source);
  if (o.sparse_layers) {
    if (model.config.model.has_nsa())
      fail_usage("--sparse-layers: {} has NSA: a model whose layers are all dense is needed", o.loss.checkpoint);
    with_sparse_layer(model.config.model, 0);  // its shape may be impossible for NSA
  }
  if (!o.per_document.empty()) check_output_file("--per-document", o.per_document);
  if (!o.per_position.empty()) check_output_file("--per-position", o.per_position);

  const Losses losses = evaluate(o.loss, model, *tokenizer, *source);
  std::optional<Losses> against;
  if (other_model) {
    LossOptions same_rows = o.loss;
    same_rows.checkpoint = o.against, same_rows.seq = losses.seq_len;
    against.emplace(evaluate(same_rows, *other_model, *tokenizer, *source));
  }
  std::vector<SparseLayer> sparse_layers;
  if (o.sparse_layers) sparse_layers = evaluate_sparse_layers(o.loss, model, *tokenizer, *source);
  const Losses* const other = against ? &*against : nullptr;
  const double loss = losses.mean();
  if (!o.per_document.empty()) write_file_atomically(o.per_document, losses.by_document->csv());
  if (!o.per_position.empty()) write_file_atomically(o.per_position, losses.by_position.csv());
  const Total& total = losses.total;
  const bool has_bytes = total.bytes > 0;
  // NaN (null in JSON) if the byte count is unknown.
  const double bits = bits_per_byte(total.loss, static_cast<double>(total.bytes));
  Json result = json_of(o, losses, bits, other);
  record_evaluation(o.loss.checkpoint, model, o.loss.data, result);
  if (o.json) {
    for (const SparseLayer& s : sparse_layers)
      result["sparse_layers"].push_back({{"layer", s.layer}, {"loss", s.loss}});
    return fmt::print("{}\n", dump_json(result, -1));
  }
  fmt::print("{}: {}, loss {:.4f}, perplexity {:.3f}{}\n", source->name(), counted(total.positions, "position"), loss,
             std::exp(loss), has_bytes ? fmt::format(", bits per byte {:.4f}", bits) : "");
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
  verb.add_option("--lengths", o.questions.lengths,
                  "for --needle: sequence lengths in tokens (default: 1/8, 1/4, 1/2 and all of the training length, "
                  "without those too short for the task)")
      ->check(within(at_least(1).up_to(kMaxSeqLen)))
      ->delimiter(',')
      ->needs(needle);
  verb.add_option("--depths", o.questions.depths,
                  "for --needle: positions of the needle in the sequence, 0 the beginning, 1 the end")
      ->check(within(at_least(0).up_to(1)))
      ->delimiter(',')
      ->capture_default_str()
      ->needs(needle);
  verb.add_option("--samples", o.questions.samples, "for --needle: sequences for each length and depth")
      ->check(within(at_least(1).up_to(kMaxBatch)))
      ->capture_default_str()
      ->needs(needle);
  verb.add_option("--pairs", o.questions.pairs,
                  "for --needle: keys or chains in each sequence, as data.needle_pairs (default: as densely as in "
                  "training, so that longer sequences have more)")
      ->check(within(at_least(1).up_to(kMaxInteger)))
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
  verb->add_option("--checkpoint", o->loss.checkpoint, "a checkpoint, or a run's folder")->required();
  CLI::Option* data = verb->add_option("--data", o->loss.data,
                                       "text, JSONL or token shards: files or globs; gzip and zstd are decompressed");
  CLI::Option* needle = add_needle_options(*verb, *o);
  CLI::Option* format = add_format(*verb, o->format);
  CLI::Option* seq = verb->add_option("--seq", o->loss.seq, "tokens of a sequence; 0: the training length")
                         ->check(within(at_least(0).up_to(kMaxSeqLen)))
                         ->capture_default_str();
  verb->add_option("--batch", o->loss.batch, "sequences that run together")
      ->check(within(at_least(1).up_to(kMaxBatch)))
      ->capture_default_str();
  CLI::Option* batches =
      verb->add_option("--batches", o->loss.batches, "evaluate only this many batches from the beginning; 0: all")
          ->check(within(at_least(0).up_to(kMaxInteger)))
          ->capture_default_str();
  verb->add_option("--device", o->loss.device, "auto, cpu or cuda")->capture_default_str();
  verb->add_option("--dtype", o->loss.dtype, "f64, f32 or bf16")->capture_default_str();
  CLI::Option* per_document =
      verb->add_option("--per-document", o->per_document,
                       "also write a CSV file with a row for each document: number, first token, tokens, positions, "
                       "loss, perplexity")
          ->check(named());
  CLI::Option* per_position =
      verb->add_option("--per-position", o->per_position,
                       "also write a CSV file with the loss by position; as positions.csv in the run's folder, triad "
                       "report draws it")
          ->check(named());
  CLI::Option* against =
      verb->add_option(
              "--against", o->against,
              "also evaluate this checkpoint, or run's folder, on the same tokens, and print the difference of "
              "the losses (--checkpoint minus this) with its standard error, in all and by position")
          ->check(named());
  CLI::Option* sparse_layers =
      verb->add_flag("--sparse-layers", o->sparse_layers,
                     "of a dense model: also the loss with NSA in one layer alone, before any training, for each "
                     "layer. Those that lose most are best kept dense (model.dense_layers) in a run that begins with "
                     "these weights (train.init_from)");
  for (CLI::Option* option : {data, format, seq, batches, per_document, per_position, against, sparse_layers})
    needle->excludes(option);
  verb->add_flag("--json", o->json, "print one JSON object");
  verb->callback([o] {
    if (o->loss.data.empty() && !o->needle) fail_usage("eval: --data or --needle is required");
    if (!o->needle) return eval(*o);
    check_environment();
    NeedleQuestions questions = o->questions;
    questions.batch = o->loss.batch;
    eval_needle({.checkpoint = o->loss.checkpoint,
                 .device = o->loss.device,
                 .dtype = o->loss.dtype,
                 .out = o->out,
                 .task = o->task,
                 .questions = questions,
                 .json = o->json});
  });
}

}  // namespace triad
