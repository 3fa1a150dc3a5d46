// triad score: computes log-probabilities of continuations after contexts, for evaluation harnesses; it reads and
// writes one JSON line per request. Texts are tokenized as lm-evaluation-harness does. An end-of-text token precedes
// each context, as it precedes each document in training and in `triad generate`.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string_view>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "io/data/format/text_format.h"
#include "io/data/record.h"
#include "io/data/text_input.h"
#include "io/file.h"
#include "io/tokenizer/tokenizer.h"
#include "io/tokenizer/unicode.h"
#include "kernels/common/integer.h"
#include "tools/options.h"
#include "tools/verbs.h"
#include "tools/work_progress.h"
#include "train/config/load_config.h"
#include "train/inference.h"

namespace triad {

namespace {

struct Options {
  std::string checkpoint, jsonl, out = "-", device = "auto", dtype = "f32";
  int64_t batch = 8, seq = 0;
};

struct Request {
  std::vector<int32_t> tokens;  // context tokens, then continuation tokens
  size_t first = 0;             // where the continuation begins
  double logprob = 0;
  bool greedy = true;
  std::string error;  // what is wrong with the request, which is not scored then
  size_t count() const { return tokens.size() - first; }
};

// A batch row: a request's tokens [begin, begin + size]. Each token but the last predicts the next one; only the
// predictions of tokens from index `first` on count.
struct Window {
  size_t request, begin, size, first;
};

// Tokenizes a request. White space that ends the context moves to the continuation, because a word and the space before
// it are one token.
Request make_request(std::string context, std::string continuation, const Tokenizer& tokenizer) {
  const size_t end = length_without_trailing_space(context);
  continuation = context.substr(end) + continuation;
  context.resize(end);
  TRIAD_CHECK(!continuation.empty(), "the continuation is empty");
  Request request;
  const std::vector<int32_t> before = tokenizer.encode(context);
  std::vector<int32_t> both = tokenizer.encode(context + continuation);
  if (both.size() <= before.size()) {  // it joins the context's last token, so it is encoded alone
    both = before;
    tokenizer.append(continuation, both);
  }
  request.tokens = {tokenizer.eot()};
  request.tokens.insert(request.tokens.end(), both.begin(), both.end());
  request.first = 1 + before.size();
  return request;
}

// Reads the request in a line. Throws an Error that says what is wrong with it.
Request read_request(std::string_view text, const std::string& where, const Tokenizer& tokenizer, int64_t vocab) {
  const Json line = parse_json(text, where);
  const auto field = [&](const char* key) {
    const bool is_text = line.is_object() && line.contains(key) && line[key].is_string();
    TRIAD_CHECK(is_text, "{}: {}: an object with the strings \"context\" and \"continuation\" is needed", where,
                brief(line));
    return line[key].get<std::string>();
  };
  const std::string context = field("context"), continuation = field("continuation");
  Request request;
  try {
    request = make_request(context, continuation, tokenizer);
  } catch (const Error& e) { fail("{}: {}", where, e.what()); }
  for (const int32_t token : request.tokens)
    TRIAD_CHECK(token < vocab, "{}: token {} is outside of the model's vocabulary of {}", where, token, vocab);
  return request;
}

std::vector<Request> read_requests(const std::string& path, const Tokenizer& tokenizer, int64_t vocab) {
  TextInput input(path);
  content_of(input, TextFormat::jsonl);  // refuses what is no JSONL, by name
  const std::string text = read_to_end(input), &name = input.name();
  tokenizer.eot();  // throws if there's no tokenizer, which is no line's error
  std::vector<Request> requests;
  std::string_view rest = text;
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (is_blank_line(line)) continue;
    try {
      requests.push_back(read_request(line, fmt::format("{} line {}", name, number), tokenizer, vocab));
    } catch (const Error& e) {  // this line's error alone
      requests.emplace_back().error = e.what();
    }
  }
  TRIAD_CHECK(!requests.empty(), "{}: there is no line to score", name);
  return requests;
}

// Adds a request's windows. The continuation gets as much context as fits in T tokens. A continuation longer than T is
// cut into consecutive windows without further context, as in `triad eval`.
void add_windows(std::vector<Window>& windows, const Request& r, size_t request, size_t T) {
  if (!r.error.empty()) return;
  const size_t predictions = r.tokens.size() - 1;
  if (r.count() <= T) {
    const size_t size = std::min(T, predictions);
    windows.push_back({request, predictions - size, size, r.first});
    return;
  }
  for (size_t begin = r.first - 1; begin < predictions; begin += T)
    windows.push_back({request, begin, std::min(T, predictions - begin), r.first});
}

// Whether each counted token in a window is the model's most likely one. row: batch row with the window's first token.
bool is_greedy(LoadedModel& loaded, const Request& r, const Window& w, int64_t row) {
  const int64_t V = loaded.config().model.vocab_size;
  const size_t skip = std::max(w.first - 1, w.begin) - w.begin;
  for (size_t at = skip; at < w.size; at += LoadedModel::kLogitRows) {
    const size_t n = std::min(w.size - at, static_cast<size_t>(LoadedModel::kLogitRows));
    const std::vector<double> logits = loaded.logits(row + static_cast<int64_t>(at), static_cast<int64_t>(n));
    for (size_t i = 0; i < n; ++i) {
      const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(i) * V;
      if (std::max_element(begin, begin + V) - begin != r.tokens[w.begin + at + i + 1]) return false;
    }
  }
  return true;
}

// Runs forward over at most B windows and adds their results to the requests.
void score_batch(LoadedModel& loaded, std::vector<Request>& requests, std::span<const Window> windows) {
  const int64_t B = loaded.activations().B(), T = loaded.activations().T();
  std::vector<int32_t> tokens(static_cast<size_t>(B * T), 0), targets(tokens.size(), -1);
  for (size_t b = 0; b < windows.size(); ++b) {
    const Window& w = windows[b];
    const Request& r = requests[w.request];
    for (size_t i = 0; i < w.size; ++i) {
      const size_t at = b * static_cast<size_t>(T) + i, next = w.begin + i + 1;
      tokens[at] = r.tokens[w.begin + i];
      if (next >= w.first) targets[at] = r.tokens[next];
    }
  }
  loaded.set_tokens(tokens, targets);
  loaded.model().forward(loaded.ctx(), loaded.activations());
  loaded.model().loss(loaded.ctx(), loaded.activations());
  const std::vector<double> losses = read_floats(loaded.ctx(), loaded.activations().row_loss);
  for (size_t b = 0; b < windows.size(); ++b) {
    Request& r = requests[windows[b].request];
    const int64_t row = static_cast<int64_t>(b) * T;
    for (size_t i = 0; i < windows[b].size; ++i) r.logprob -= losses[static_cast<size_t>(row) + i];
    r.greedy = r.greedy && is_greedy(loaded, r, windows[b], row);
  }
}

std::string result_line(const Request& r, const std::string& checkpoint, size_t number) {
  if (!r.error.empty()) return dump_json(Json{{"error", r.error}}, -1) + "\n";
  TRIAD_CHECK(std::isfinite(r.logprob), "{}: the log-probability of line {} is {}: weights that are not finite?",
              checkpoint, number, r.logprob);
  const Json line = {{"logprob", r.logprob}, {"tokens", r.count()}, {"greedy", r.greedy}};
  return dump_json(line, -1) + "\n";
}

// Scores all windows, and calls done(n) when the first n requests' results are complete.
template <class Done>
void score_windows(const Options& o, size_t most, std::vector<Request>& requests, std::span<const Window> windows,
                   Done&& done) {
  size_t longest = 0;
  for (const Window& w : windows) longest = std::max(longest, w.size);
  constexpr size_t kTile = 64;  // kernels round rows up to tiles this long, so a shorter row costs as much
  const size_t T = std::min(most, round_up(longest, kTile));
  const auto B = std::min(static_cast<size_t>(o.batch), windows.size());
  LoadedModel loaded({.checkpoint = o.checkpoint,
                      .device = parse_device(o.device),
                      .dtype = parse_dtype(o.dtype),
                      .batch = static_cast<int64_t>(B),
                      .seq_len = static_cast<int64_t>(T)});
  WorkProgress progress("score", "windows", static_cast<int64_t>(windows.size()));
  int64_t tokens = 0;
  for (size_t begin = 0; begin < windows.size(); begin += B) {
    const auto batch = windows.subspan(begin, std::min(B, windows.size() - begin));
    score_batch(loaded, requests, batch);
    for (const Window& w : batch) tokens += static_cast<int64_t>(w.size);
    progress.show(static_cast<int64_t>(begin + batch.size()), tokens);
    if (begin + B < windows.size()) done(windows[begin + B].request);
  }
}

void score(const Options& o) {
  check_environment();
  const ModelSource source = find_model(o.checkpoint);
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_of_checkpoint(source.folder, source.config.data.tokenizer);
  std::vector<Request> requests = read_requests(o.jsonl, *tokenizer, source.config.model.vocab_size);
  const auto most = static_cast<size_t>(o.seq > 0 ? o.seq : source.config.train.longest_seq_len());
  std::vector<Window> windows;
  for (size_t i = 0; i < requests.size(); ++i) add_windows(windows, requests[i], i, most);
  std::string text;
  size_t written = 0;
  const auto write = [&](size_t whole) {
    for (; written < whole; ++written) text += result_line(requests[written], o.checkpoint, written + 1);
    if (o.out != kStandardInput) return;
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    text.clear();
  };
  if (!windows.empty()) score_windows(o, most, requests, windows, write);
  write(requests.size());
  if (o.out != kStandardInput) write_file_atomically(o.out, text);
  const auto is_bad = [](const Request& r) { return !r.error.empty(); };
  const auto first = std::find_if(requests.begin(), requests.end(), is_bad);
  if (first == requests.end()) return;
  fail("{} of {} could not be scored: {}", std::count_if(first, requests.end(), is_bad),
       counted(requests.size(), "request"), first->error);
}

}  // namespace

void add_score(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("score", "log-probabilities of continuations after contexts, for evaluation harnesses");
  verb->add_option("--checkpoint", o->checkpoint, "a checkpoint, a run's folder, or a file of weights in one")
      ->required();
  verb->add_option("--jsonl", o->jsonl,
                   "file of lines {\"context\": ..., \"continuation\": ...}, or - for standard input; an empty context "
                   "means the beginning of a document")
      ->required();
  verb->add_option(
          "--out", o->out,
          "file of results, one line per request: {\"logprob\": log-probability of the continuation in nats, "
          "\"tokens\": number of its tokens, \"greedy\": whether the model finds each of them the most likely one}, or "
          "{\"error\": what is wrong with the request}, after which the exit code is 1; "
          "-: standard output")
      ->capture_default_str();
  verb->add_option("--seq", o->seq, "longest window of context and continuation in tokens; 0: the training length")
      ->check(within(at_least(0).up_to(kMaxSeqLen)))
      ->capture_default_str();
  verb->add_option("--batch", o->batch, "sequences that run together")
      ->check(within(at_least(1).up_to(kMaxBatch)))
      ->capture_default_str();
  verb->add_option("--device", o->device, "auto, cpu or cuda")->capture_default_str();
  verb->add_option("--dtype", o->dtype, "f64, f32 or bf16")->capture_default_str();
  verb->callback([o] { score(*o); });
}

}  // namespace triad
