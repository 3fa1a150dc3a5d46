// triad grads: runs a checkpoint's forward and backward once on given tokens. It writes a safetensors file with the
// loss, logits, all gradients, and every layer's gates and selection lists, for comparison with another implementation.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <span>

#include "engine/check.h"
#include "engine/comm/comm.h"
#include "engine/process/counted.h"
#include "io/data/shards.h"
#include "io/safetensors.h"
#include "tools/options.h"
#include "tools/output_folder.h"
#include "tools/selection_lists.h"
#include "tools/verbs.h"
#include "train/config/load_config.h"
#include "train/document_bounds.h"
#include "train/inference.h"

namespace triad {

namespace {

struct GradsOptions {
  std::string checkpoint, tokens, documents, lists, out, device = "auto", dtype = "f32";
  int64_t batch = 1, seq = 0, context = 1;
  bool dense = false;
};

// Collects the result file's tensors and writes it: floats as F64 if the run computes in f64, else as F32.
class Results {
 public:
  explicit Results(DType dtype) : dtype_(acc_dtype(dtype)) {}

  void add(const std::string& name, const Shape& shape, const std::vector<double>& values) {
    std::vector<std::byte> bytes(values.size() * static_cast<size_t>(size_of(dtype_)));
    for (size_t i = 0; i < values.size(); ++i) {
      if (dtype_ == DType::f64)
        reinterpret_cast<double*>(bytes.data())[i] = values[i];
      else
        reinterpret_cast<float*>(bytes.data())[i] = static_cast<float>(values[i]);
    }
    add(name, dtype_, shape, std::move(bytes));
  }
  void add(const std::string& name, DType dtype, const Shape& shape, std::vector<std::byte> bytes) {
    storage_.push_back(std::move(bytes));
    specs_.push_back({name, dtype, shape});
  }
  void write(const std::string& path) const {
    std::vector<HostTensor> tensors;
    for (size_t i = 0; i < specs_.size(); ++i) tensors.push_back({specs_[i], storage_[i].data()});
    write_safetensors(path, tensors);
  }

 private:
  DType dtype_;
  std::vector<std::vector<std::byte>> storage_;
  std::vector<TensorSpec> specs_;
};

// The ranks that share the sequences (--context), and whole tensors built from their parts. One process without it.
class Ranks {
 public:
  Ranks(int64_t context, const LaunchEnv& launch, Device device) {
    if (context == 1) return;
    if (launch.world != context)
      fail_usage("--context is {}, and the number of ranks is {}: start it with mpirun -np {}", context, launch.world,
                 context);
    constexpr double kTimeoutS = 600;
    comm_ = open_comm(launch, device, CommBackend::automatic, kTimeoutS);
  }
  Comm* comm() { return comm_.get(); }
  bool first() const { return comm_ == nullptr || comm_->first(); }

  // Whole sequences' values [B, T, ..]; mine: this rank's [B, part, ..].
  template <class T>
  std::vector<T> whole(const std::vector<T>& mine, const SequenceLayout& layout, int64_t B, int64_t tokens) {
    if (comm_ == nullptr) return mine;
    const size_t row = mine.size() / static_cast<size_t>(B * layout.local_tokens());
    std::vector<T> all(static_cast<size_t>(B * layout.tokens()) * row);  // [B, ranks, part, ..]
    const size_t part = static_cast<size_t>(layout.local_tokens()) * row;
    for (int64_t b = 0; b < B; ++b)
      gather(mine.data() + static_cast<size_t>(b) * part, part, all, static_cast<size_t>(b));
    std::vector<T> cut(static_cast<size_t>(B * tokens) * row);
    for (int64_t b = 0; b < B; ++b)
      for (int64_t r = 0; r < layout.ranks; ++r)
        for (int64_t i = 0; i < layout.chunks(); ++i) {
          const RowRange chunk = layout.chunk_of(r, i);
          const auto from =
              static_cast<size_t>((b * layout.ranks + r) * layout.local_tokens() + i * layout.chunk_tokens) * row;
          const int64_t rows = std::min(chunk.end, tokens) - std::min(chunk.begin, tokens);
          std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(from), static_cast<size_t>(rows) * row,
                      cut.begin() + static_cast<std::ptrdiff_t>(
                                        static_cast<size_t>(b * tokens + std::min(chunk.begin, tokens)) * row));
        }
    return cut;
  }
  double sum(double mine, const char* what) {
    if (comm_ == nullptr) return mine;
    comm_->add({&mine, 1}, what);
    return mine;
  }
  void sum(Tensor x, const char* what) {
    if (comm_ == nullptr) return;
    comm_->all_reduce(x, what);
    comm_->stream().synchronize();
  }
  void finish() {
    if (comm_ != nullptr) comm_->finish();
  }

 private:
  // Writes all ranks' parts [part] to row b of `all` [B, ranks, part].
  template <class T>
  void gather(const T* mine, size_t part, std::vector<T>& all, size_t b) {
    constexpr size_t kMost = (size_t{1} << 22) / sizeof(T);  // elements that one call gathers
    const auto ranks = static_cast<size_t>(comm_->world());
    for (size_t at = 0; at < part; at += kMost) {
      const size_t count = std::min(kMost, part - at);
      const std::vector<std::string> texts = comm_->all_gather_host_text(
          std::string(reinterpret_cast<const char*>(mine + at), count * sizeof(T)), "rows of the result");
      for (size_t r = 0; r < ranks; ++r)
        std::memcpy(all.data() + (b * ranks + r) * part + at, texts[r].data(), count * sizeof(T));
    }
  }

  std::unique_ptr<Comm> comm_;
};

// Reads the shard's first B*(T+1) tokens into the batch, T+1 a row: the first T are tokens, the last T are targets. A
// row's last token may be -1 (4294967295 as u32): no target. With bounds, no document's last token has a target.
// Returns the target count.
int64_t load_batch(LoadedModel& loaded, const std::string& path, int64_t T, std::span<const int32_t> bounds) {
  const int64_t B = loaded.activations().B(), vocab = loaded.config().model.vocab_size;
  const Shard shard(path);
  TRIAD_CHECK(shard.size() >= B * (T + 1), "{} holds {} tokens: {} rows of {} + 1 need {}", path, shard.size(), B, T,
              B * (T + 1));
  std::vector<int32_t> row(static_cast<size_t>(T + 1)), tokens, targets;
  int64_t counted = B * T;
  for (int64_t b = 0; b < B; ++b) {
    shard.read(b * (T + 1), row);
    const bool has_last = row.back() != -1;
    counted -= has_last ? 0 : 1;
    for (int64_t i = 0; i < T + (has_last ? 1 : 0); ++i) {
      const int32_t id = row[static_cast<size_t>(i)];
      TRIAD_CHECK(id >= 0 && id < vocab,
                  "{}: token {} at position {} of row {} (token number {}) is not in the vocabulary: expected 0..{}",
                  path, static_cast<uint32_t>(id), i, b, b * (T + 1) + i, vocab - 1);
    }
    tokens.insert(tokens.end(), row.begin(), row.end() - 1);
    targets.insert(targets.end(), row.begin() + 1, row.end());
  }
  if (!bounds.empty()) {
    loaded.set_documents(bounds);
    for (const int32_t end : bounds.subspan(1)) {
      int32_t& target = targets[static_cast<size_t>(end - 1)];
      counted -= target == -1 ? 0 : 1;
      target = -1;
    }
  }
  TRIAD_CHECK(counted > 0, "{}: no position of the {} rows has a target, so there is no loss", path, B);
  loaded.set_tokens(tokens, targets);
  return counted;
}

void add_logits(LoadedModel& loaded, Ranks& ranks, int64_t T, Results& results) {
  const int64_t B = loaded.activations().B(), mine = loaded.activations().rows();
  std::vector<double> logits;
  for (int64_t begin = 0; begin < mine; begin += LoadedModel::kLogitRows) {
    const std::vector<double> rows = loaded.logits(begin, std::min(LoadedModel::kLogitRows, mine - begin));
    logits.insert(logits.end(), rows.begin(), rows.end());
  }
  results.add("logits", {B, T, loaded.config().model.vocab_size}, ranks.whole(logits, loaded.layout(), B, T));
}

// Turns ids in a layer's lists [1,T,Hkv,n] into blocks counted from each document's first token.
void count_from_document(LoadedModel& loaded, int64_t layer, int64_t T, std::vector<int32_t>& ids) {
  const Tensor first_block = loaded.activations().documents_of(layer).first_block;
  if (first_block.empty()) return;
  std::vector<int32_t> first(static_cast<size_t>(first_block.numel()));
  read(loaded.ctx(), first.data(), first_block);
  const size_t per_token = ids.size() / static_cast<size_t>(T);
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] >= 0) ids[i] -= first[i / per_token];
}

// Adds the layers' lists and gates.
void add_selection(LoadedModel& loaded, Ranks& ranks, int64_t T, Results& results) {
  const ModelConfig& model = loaded.config().model;
  const int64_t B = loaded.activations().B(), groups = model.n_kv_groups;
  for (int64_t i = 0; i < model.n_layers; ++i) {
    if (!model.has_lists(i)) continue;
    const NsaSaved& saved = loaded.activations().layer(i).attention.nsa;
    std::vector<int32_t> mine(static_cast<size_t>(saved.block_index.numel()));
    read(loaded.ctx(), mine.data(), saved.block_index);
    std::vector<int32_t> lists = ranks.whole(mine, loaded.layout(), B, T);
    count_from_document(loaded, i, T, lists);
    std::vector<std::byte> bytes(lists.size() * sizeof(int32_t));
    std::memcpy(bytes.data(), lists.data(), bytes.size());
    results.add(fmt::format("block_index/{}", i), DType::i32, {B, T, groups, model.nsa_at(i).n_sel}, std::move(bytes));
    if (saved.gate.empty()) continue;
    // The gates, transposed from [3,B,T,Hkv] to [B,T,Hkv,3].
    const std::vector<double> planes = ranks.whole(read_floats(loaded.ctx(), saved.gate), loaded.layout(), 3 * B, T);
    const size_t n = planes.size() / 3;
    std::vector<double> gates(planes.size());
    for (size_t j = 0; j < n; ++j)
      for (size_t branch = 0; branch < 3; ++branch) gates[3 * j + branch] = planes[branch * n + j];
    results.add(fmt::format("gate/{}", i), {B, T, groups, 3}, gates);
  }
}

// Adds the mean index loss of each layer with an index; rows: all rows and groups.
void add_index_loss(LoadedModel& loaded, Ranks& ranks, double rows, Results& results) {
  ranks.sum(loaded.model().index_loss(), "the index loss");
  const std::vector<double> sums = read_floats(loaded.ctx(), loaded.model().index_loss());
  std::vector<double> means;
  for (int64_t i = 0; i < loaded.config().model.n_layers; ++i)
    if (loaded.config().model.has_index(i)) means.push_back(sums[static_cast<size_t>(i)] / rows);
  results.add("index_loss", {static_cast<int64_t>(means.size())}, means);
}

// Prints which kernels multiplied in fp8, and how many products should have and did not.
void print_fp8_routes(const Routes& routes) {
  std::map<std::string, int64_t> calls;
  for (const Routes::Count& c : routes.counts())
    if (c.op == "matmul_fp8") calls[c.kernel + (c.is_fallback() ? " (" + c.reason + ")" : "")] += c.calls;
  for (const auto& [kernel, n] : calls) fmt::print("matmul_fp8: {} {}\n", kernel, counted(n, "time"));
}

void grads(const GradsOptions& o) {
  check_environment();
  std::vector<int32_t> bounds;
  if (!o.documents.empty()) {
    if (o.batch != 1) fail_usage("--documents {} describes one row, and --batch is {}", o.documents, o.batch);
    bounds = read_document_bounds(o.documents, o.seq);
  }
  if (o.context > o.seq) fail_usage("--context is {}: --seq is {}, and each rank needs a token", o.context, o.seq);
  if (!o.lists.empty() && (o.dense || o.context > 1))
    fail_usage("--lists {} gives the lists of whole rows, and {}", o.lists,
               o.dense ? "--dense attends without lists" : fmt::format("--context is {}", o.context));
  check_output_file("--out", o.out);
  const LaunchEnv launch = o.context > 1 ? read_launch_env() : LaunchEnv{};
  const Device device = parse_device(o.device, launch);
  Ranks ranks(o.context, launch, device);
  const bool fp8 = o.dtype == "fp8";
  LoadedModel loaded({.checkpoint = o.checkpoint,
                      .device = device,
                      .dtype = fp8 ? DType::bf16 : parse_dtype(o.dtype),
                      .fp8 = fp8,
                      .batch = o.batch,
                      .seq_len = o.seq,
                      .training = true,
                      .most_documents = static_cast<int64_t>(bounds.size()) - (bounds.empty() ? 0 : 1),
                      .dense = o.dense,
                      .comm = ranks.comm()});
  const auto counted = static_cast<double>(load_batch(loaded, o.tokens, o.seq, bounds));
  if (!o.lists.empty()) give_lists(loaded, o.lists, bounds);
  Context& ctx = loaded.ctx();
  Model& model = loaded.model();
  Activations& act = loaded.activations();
  zero(ctx, model.params().grads());
  model.forward(ctx, act);
  const ModelConfig& config = loaded.config().model;
  const auto index_rows = static_cast<double>(o.batch * o.seq * config.n_kv_groups);
  model.loss_and_backward(ctx, act, {1.0 / counted, config.nsa.index_loss / index_rows});

  Results results(model.dtype());
  double loss = 0;
  for (const double row : read_floats(ctx, act.row_loss)) loss += row;
  loss = ranks.sum(loss, "the loss");
  ranks.sum(model.params().grads(), "the gradients");
  results.add("loss", {1}, {loss / counted});
  add_logits(loaded, ranks, o.seq, results);
  if (config.has_index()) add_index_loss(loaded, ranks, index_rows, results);
  if (config.has_nsa() && !o.dense) add_selection(loaded, ranks, o.seq, results);
  const Params& params = model.params();
  for (int64_t i = 0; i < params.count(); ++i)
    results.add("grad/" + params.specs()[i].name, params.specs()[i].shape,
                read_floats(ctx, params.part(params.grads(), i)));
  ranks.finish();
  if (!ranks.first()) return;
  results.write(o.out);
  fmt::print("{}: loss {:.6f}, {} gradients, {} on {}\n", o.out, loss / counted, params.count(), name_of(model.dtype()),
             ctx.device.str());
  if (fp8) print_fp8_routes(ctx.routes);
}

}  // namespace

void add_grads(CLI::App& app) {
  auto o = std::make_shared<GradsOptions>();
  CLI::App* verb =
      app.add_subcommand("grads", "run forward and backward once; write loss, logits, gradients, gates and lists");
  verb->add_option("--checkpoint", o->checkpoint, "a checkpoint, or a run's folder")->required();
  verb->add_option("--tokens", o->tokens, "a token shard (u16 or u32)")->required();
  verb->add_option("--batch", o->batch, "number of rows B")->required()->check(within(at_least(1).up_to(kMaxBatch)));
  verb->add_option("--seq", o->seq, "tokens T of a row; each row reads T+1 tokens of the shard")
      ->required()
      ->check(within(at_least(1).up_to(kMaxSeqLen)));
  verb->add_option("--documents", o->documents,
                   "a file of 32-bit integers, the bounds of the documents of one row: 0, ascending, the last T; no "
                   "document's last token has a target")
      ->check(named());
  verb->add_option("--lists", o->lists,
                   "a safetensors file with selection lists, such as another run's --out: attend to them instead of "
                   "selecting")
      ->check(named());
  verb->add_flag("--dense", o->dense,
                 "attend as in a stage of train.stages with attention dense; lists and gates are not written");
  verb->add_option("--context", o->context,
                   "number of ranks that share each row, started by mpirun -np; rank 0 writes the file")
      ->check(within(at_least(1).up_to(1 << 16)));
  verb->add_option("--out", o->out, "safetensors file to write")->required();
  verb->add_option("--device", o->device, "auto, cpu or cuda")->capture_default_str();
  verb->add_option("--dtype", o->dtype,
                   "f64, f32 or bf16; fp8: bf16, with the layers' matrices multiplied as with "
                   "runtime.matmul_dtype fp8")
      ->capture_default_str();
  verb->callback([o] { grads(*o); });
}

}  // namespace triad
