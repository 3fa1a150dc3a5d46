#include "tools/text_files.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <thread>
#include <utility>

#include "engine/check.h"
#include "engine/process/seconds_since.h"
#include "io/data/text_input.h"
#include "io/file.h"
#include "tools/options.h"

namespace triad {

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

CLI::Option* add_text_input(CLI::App& verb, std::vector<std::string>& input) {
  return verb
      .add_option(
          "--input", input,
          "files or globs of text or JSONL, may be compressed by gzip or zstd; ** matches folders at any depth; -: "
          "standard input")
      ->required();
}

CLI::Option* add_skip_bad(CLI::App& verb, bool& skip_bad) {
  return verb.add_flag("--skip-bad", skip_bad, "leave out lines of JSONL that are no records, and count them");
}

CLI::Option* add_threads(CLI::App& verb, int64_t& threads, std::string_view job) {
  return verb.add_option("--threads", threads, fmt::format("threads that {}; 0: one for each core", job))
      ->check(within(at_least(0).up_to(1024)))
      ->capture_default_str();
}

int threads_of(int64_t threads) {
  return static_cast<int>(threads > 0 ? threads : std::max<int64_t>(1, std::thread::hardware_concurrency()));
}

std::vector<std::string> text_files(const std::vector<std::string>& input, TextFormat format) {
  std::vector<std::string> files = input;
  if (input != std::vector<std::string>{kStandardInput}) files = expand_globs(input);
  for (const std::string& file : files)
    if (!is_stream(file) && content_of(file, format) == Content::shard) fail("{} is a token shard already", file);
  return files;
}

int64_t size_of_files(const std::vector<std::string>& files) {
  int64_t bytes = 0;
  for (const std::string& file : files)
    if (!is_stream(file)) bytes += static_cast<int64_t>(std::filesystem::file_size(file));
  return bytes;
}

InputProgress::InputProgress(std::string unit, int64_t input_bytes, int64_t input_before, int64_t text_before)
    : unit_(std::move(unit)),
      total_(input_bytes),
      input_before_(input_before),
      text_before_(text_before),
      terminal_(isatty(STDERR_FILENO) != 0),
      began_(Clock::now()),
      shown_(began_) {}

void InputProgress::show(int64_t input_bytes, int64_t text_bytes, int64_t results, bool last) {
  const double every = terminal_ ? 0.2 : 10;
  if (!last && seconds_since(shown_) < every) return;
  if (last && !shown_once_ && !terminal_) return;  // a call that ends before its first progress line prints none
  shown_ = Clock::now();
  shown_once_ = true;
  const double elapsed = seconds_since(began_);
  std::string line = fmt::format("{:.1f} MB of text, {:.2f} {}, {:.1f} MB/s", static_cast<double>(text_bytes) / 1e6,
                                 static_cast<double>(results) / 1e6, unit_,
                                 static_cast<double>(text_bytes - text_before_) / 1e6 / elapsed);
  if (total_ > 0) {
    const double share = std::min(1.0, static_cast<double>(input_bytes) / static_cast<double>(total_));
    constexpr int kWidth = 30;
    const auto full = static_cast<size_t>(share * kWidth);
    const double rate = static_cast<double>(input_bytes - input_before_) / elapsed;
    line = fmt::format("[{}{}] {:3.0f}%  {}, {:.0f} s left", std::string(full, '#'), std::string(kWidth - full, '.'),
                       share * 100, line,
                       rate > 0 ? static_cast<double>(std::max<int64_t>(0, total_ - input_bytes)) / rate : 0.0);
  }
  fmt::print(stderr, "{}{}{}", terminal_ ? "\r\x1b[2K" : "", line, terminal_ && !last ? "" : "\n");
  std::fflush(stderr);
}

}  // namespace triad
