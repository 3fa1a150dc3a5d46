// What the verbs that read texts and JSONL as a corpus share: --input and its files, threads, and the progress.
#pragma once
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/data/format/text_format.h"

namespace triad {

CLI::Option* add_text_input(CLI::App& verb, std::vector<std::string>& input);
CLI::Option* add_skip_bad(CLI::App& verb, bool& skip_bad);
// Adds --threads; job: what the threads do.
CLI::Option* add_threads(CLI::App& verb, int64_t& threads, std::string_view job);
int threads_of(int64_t threads);  // --threads, with 0 for one on each core

// The files of --input: those that the globs match, or standard input. Throws if one of them is a token shard.
std::vector<std::string> text_files(const std::vector<std::string>& input, TextFormat format);
int64_t size_of_files(const std::vector<std::string>& files);  // bytes, without standard input and pipes

// Prints progress to stderr: on a terminal a bar, elsewhere a line every 10 s.
class InputProgress {
 public:
  // unit: a noun for the results, after their number in millions. input_before, text_before: input and text bytes that
  // an earlier call processed before it was killed.
  InputProgress(std::string unit, int64_t input_bytes, int64_t input_before = 0, int64_t text_before = 0);
  void show(int64_t input_bytes, int64_t text_bytes, int64_t results, bool last = false);

 private:
  std::string unit_;
  int64_t total_, input_before_, text_before_;
  bool terminal_, shown_once_ = false;
  std::chrono::steady_clock::time_point began_, shown_;
};

}  // namespace triad
