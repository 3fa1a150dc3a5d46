// triad score: computes log-probabilities of continuations after contexts, for evaluation harnesses; it reads and
// writes one JSON line per request. Texts are tokenized as lm-evaluation-harness does. An end-of-text token precedes
// each context, as it precedes each document in training and in `triad generate`.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string_view>
#include <unordered_map>

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
#include "tools/whole_lines.h"
#include "tools/work_progress.h"
#include "train/config/load_config.h"
#include "train/inference.h"

namespace triad {

namespace {

struct ScoreOptions {
  std::string checkpoint, jsonl, out = "-", device = "auto", dtype = "f32";
  int64_t batch = 8, seq = 0;
};

struct Request {
  std::vector<int32_t> tokens;  // context tokens, then continuation tokens
  size_t first = 0;             // where the continuation begins
  std::string error;            // what is wrong with the request, which is not scored then
  size_t count() const { return tokens.size() - first; }
};

// A request's tokens [begin, begin + size], a document of a pass. Each token but the last predicts the next one; only
// the predictions of tokens from index `first` on count.
struct Window {
  size_t request, begin, size, first;
  // The first window with the same tokens but for the last one, which is only predicted, as in questions with answers
  // of one token: one pass serves all of them.
  size_t same_as = 0;
  std::vector<size_t> others = {};  // such windows, if this is the first
  double logprob = 0;
  bool greedy = true;
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
    windows.push_back({.request = request, .begin = predictions - size, .size = size, .first = r.first});
    return;
  }
  for (size_t begin = r.first - 1; begin < predictions; begin += T)
    windows.push_back({.request = request, .begin = begin, .size = std::min(T, predictions - begin), .first = r.first});
}

std::span<const int32_t> tokens_of(const Window& w, const std::vector<Request>& requests) {
  return std::span(requests[w.request].tokens).subspan(w.begin, w.size + 1);
}
// Predictions in a window that do not count.
size_t skipped(const Window& w) { return std::max(w.first - 1, w.begin) - w.begin; }

// Finds windows with the same inputs and counted predictions. Equal requests thereby have equal results.
void find_equal(std::vector<Window>& windows, const std::vector<Request>& requests) {
  const auto inputs_of = [&](const Window& w) { return tokens_of(w, requests).first(w.size); };
  std::unordered_multimap<size_t, size_t> by_hash;
  for (size_t i = 0; i < windows.size(); ++i) {
    const auto inputs = inputs_of(windows[i]);
    const auto* const bytes = reinterpret_cast<const char*>(inputs.data());
    const size_t hash = std::hash<std::string_view>()({bytes, inputs.size_bytes()});
    windows[i].same_as = i;
    const auto [begin, end] = by_hash.equal_range(hash);
    for (auto entry = begin; entry != end; ++entry) {
      const Window& other = windows[entry->second];
      if (skipped(other) == skipped(windows[i]) && std::ranges::equal(inputs_of(other), inputs))
        windows[i].same_as = entry->second;
    }
    if (windows[i].same_as == i)
      by_hash.emplace(hash, i);
    else
      windows[windows[i].same_as].others.push_back(i);
  }
}

// Whether the counted predictions of a window up to prediction `end` are of the model's most likely tokens. row: row of
// the window's first token.
bool is_greedy(LoadedModel& loaded, std::span<const int32_t> tokens, const Window& w, int64_t row, size_t end) {
  for (size_t at = skipped(w); at < end; at += LoadedModel::kLogitRows) {
    const size_t n = std::min(end - at, static_cast<size_t>(LoadedModel::kLogitRows));
    const std::vector<int32_t> likeliest = loaded.likeliest(row + static_cast<int64_t>(at), static_cast<int64_t>(n));
    if (!std::ranges::equal(likeliest, tokens.subspan(at + 1, n))) return false;
  }
  return true;
}

// Fills a window's results, and those of the windows with the same inputs. losses: those of its predictions.
void read_results(LoadedModel& loaded, const std::vector<Request>& requests, std::vector<Window>& windows, size_t i,
                  std::span<const double> losses, int64_t row) {
  Window& w = windows[i];
  const auto tokens = tokens_of(w, requests);
  const size_t last = w.size - 1;
  double before = 0;  // log-probability of all predictions but the last
  for (const double loss : losses.first(last)) before -= loss;
  if (w.others.empty()) {
    w.logprob = before - losses[last];
    w.greedy = is_greedy(loaded, tokens, w, row, w.size);
    return;
  }
  const int64_t last_row = row + static_cast<int64_t>(last);
  const bool greedy_before = is_greedy(loaded, tokens, w, row, last);
  const int32_t likeliest = loaded.likeliest(last_row, 1).at(0);
  const auto fill = [&](Window& each) {
    const int32_t target = tokens_of(each, requests).back();
    each.logprob = before - loaded.row_loss(last_row, target);
    each.greedy = greedy_before && likeliest == target;
  };
  fill(w);
  for (const size_t other : w.others) fill(windows[other]);
}

// Runs forward over some windows, which fit into one row, as the row's documents.
void score_pass(LoadedModel& loaded, const std::vector<Request>& requests, std::vector<Window>& windows,
                std::span<const size_t> pass) {
  const auto rows = static_cast<size_t>(loaded.activations().rows());
  std::vector<int32_t> tokens, targets, bounds;
  for (const size_t i : pass) {
    const auto all = tokens_of(windows[i], requests), counted = all.subspan(1 + skipped(windows[i]));
    bounds.push_back(static_cast<int32_t>(tokens.size()));
    tokens.insert(tokens.end(), all.begin(), all.end() - 1);
    targets.resize(targets.size() + skipped(windows[i]), -1);
    targets.insert(targets.end(), counted.begin(), counted.end());
  }
  if (tokens.size() < rows) bounds.push_back(static_cast<int32_t>(tokens.size()));
  bounds.push_back(static_cast<int32_t>(rows));
  tokens.resize(rows, 0), targets.resize(rows, -1);
  loaded.set_tokens(tokens, targets);
  loaded.set_documents(bounds);
  loaded.model().forward(loaded.ctx(), loaded.activations());
  loaded.model().loss(loaded.ctx(), loaded.activations());
  const std::vector<double> losses = read_floats(loaded.ctx(), loaded.activations().row_loss);
  for (size_t i = 0; i < pass.size(); ++i)
    read_results(loaded, requests, windows, pass[i],
                 std::span(losses).subspan(static_cast<size_t>(bounds[i]), windows[pass[i]].size), bounds[i]);
}

// windows: the request's.
std::string result_line(const Request& r, std::span<const Window> windows, const std::string& checkpoint,
                        size_t number) {
  if (!r.error.empty()) return dump_json(Json{{"error", r.error}}, -1) + "\n";
  double logprob = 0;
  bool greedy = true;
  for (const Window& w : windows) logprob += w.logprob, greedy = greedy && w.greedy;
  TRIAD_CHECK(std::isfinite(logprob), "{}: the log-probability of line {} is {}: weights that are not finite?",
              checkpoint, number, logprob);
  const Json line = {{"logprob", logprob}, {"tokens", r.count()}, {"greedy", greedy}};
  return dump_json(line, -1) + "\n";
}

// Scores all windows, and calls done(n) when the first n windows' results are complete.
template <class Done>
void score_windows(const ScoreOptions& o, size_t most, const std::vector<Request>& requests,
                   std::vector<Window>& windows, Done&& done) {
  size_t longest = 0, all = 0;
  for (size_t i = 0; i < windows.size(); ++i) {
    longest = std::max(longest, windows[i].size);
    if (windows[i].same_as == i) all += windows[i].size;
  }
  constexpr size_t kTile = 64;  // kernels round rows up to tiles this long, so a shorter row costs as much
  constexpr size_t kShort = 8;  // tokens of a window; of shorter ones a pass has no more
  const size_t T = std::min(most, round_up(longest, kTile));
  const size_t room = std::min(T * static_cast<size_t>(o.batch), std::max(T, round_up(all, kTile)));
  const size_t most_windows = room / kShort + 1;
  LoadedModel loaded({.checkpoint = o.checkpoint,
                      .device = parse_device(o.device),
                      .dtype = parse_dtype(o.dtype),
                      .batch = 1,
                      .seq_len = static_cast<int64_t>(room),
                      .most_documents = static_cast<int64_t>(most_windows + 1)});
  WorkProgress progress("score", "windows", static_cast<int64_t>(windows.size()));
  int64_t tokens = 0;
  for (size_t begin = 0; begin < windows.size();) {
    std::vector<size_t> pass;
    size_t used = 0, end = begin;
    for (; end < windows.size() && pass.size() < most_windows; ++end) {
      const Window& w = windows[end];
      if (w.same_as != end) continue;
      if (used + w.size > room) break;
      pass.push_back(end);
      used += w.size;
    }
    if (!pass.empty()) score_pass(loaded, requests, windows, pass);
    tokens += static_cast<int64_t>(used);
    progress.show(static_cast<int64_t>(end), tokens);
    done(begin = end);
  }
}

void score(const ScoreOptions& o) {
  check_environment();
  const ModelSource source = find_model(o.checkpoint);
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_of_checkpoint(source.folder, source.config.data.tokenizer);
  std::vector<Request> requests = read_requests(o.jsonl, *tokenizer, source.config.model.vocab_size);
  const auto most = static_cast<size_t>(o.seq > 0 ? o.seq : source.config.train.longest_seq_len());
  std::vector<Window> windows;
  for (size_t i = 0; i < requests.size(); ++i) add_windows(windows, requests[i], i, most);
  find_equal(windows, requests);
  std::string text;
  size_t written = 0, first = 0;  // requests; the first one's window
  const auto write = [&](size_t whole) {
    for (; written < requests.size(); ++written) {
      size_t end = first;
      while (end < windows.size() && windows[end].request == written) ++end;
      if (end > whole) break;
      const std::string line =
          result_line(requests[written], std::span(windows).subspan(first, end - first), o.checkpoint, written + 1);
      if (o.out == kStandardInput)
        write_whole_line(line);
      else
        text += line;
      first = end;
    }
  };
  if (!windows.empty()) score_windows(o, most, requests, windows, write);
  write(windows.size());
  if (o.out != kStandardInput) write_file_atomically(o.out, text);
  const auto is_bad = [](const Request& r) { return !r.error.empty(); };
  const auto bad = std::find_if(requests.begin(), requests.end(), is_bad);
  if (bad == requests.end()) return;
  fail("{} of {} could not be scored: {}", std::count_if(bad, requests.end(), is_bad),
       counted(requests.size(), "request"), bad->error);
}

}  // namespace

void add_score(CLI::App& app) {
  auto o = std::make_shared<ScoreOptions>();
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
  verb->add_option("--batch", o->batch,
                   "longest windows that run together; of shorter ones as many as have as many tokens")
      ->check(within(at_least(1).up_to(kMaxBatch)))
      ->capture_default_str();
  verb->add_option("--device", o->device, "auto, cpu or cuda")->capture_default_str();
  verb->add_option("--dtype", o->dtype, "f64, f32 or bf16")->capture_default_str();
  verb->callback([o] { score(*o); });
}

}  // namespace triad
