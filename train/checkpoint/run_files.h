// The files in a run's folder, divided into those that runs and the verbs about runs have made, and those in their way.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// A line for each of log.samples' prompts and each evaluation of the run; a line for each `triad eval` of its weights.
inline constexpr const char *kSamplesFile = "samples.jsonl", *kEvaluationsFile = "eval.jsonl";

struct RunFiles {
  // Files and checkpoint folders that a run has made, as paths, in the order in which a new run removes them: the most
  // valuable ones last, so they survive if removing an earlier one fails.
  std::vector<std::string> own;
  std::vector<std::string> folders;  // a run's folders, which go if they are empty then; parents after children
  // Files and folders that have a run's names but weren't made by one. A run ignores all others.
  std::vector<std::string> foreign;
};

// What a new run would remove, and what is in its way. A file is known by its content, and where that is not enough
// (logs, the tokenizer) by env.json in the same folder, which a run writes first.
RunFiles list_run_files(const std::string& folder);
// The files in the way of a resume: all those of a run's names that a run has not made, because a resume replaces or
// shortens some, and appends to others. A config.json may have been edited by hand.
std::vector<std::string> in_way_of_resume(const std::string& folder);
// Whether a run has made the file by this name.
bool is_own_run_file(const std::string& folder, const std::string& name);
// The temporary files that killed runs have left.
std::vector<std::string> unfinished_run_files(const std::string& folder);

// A file content's checksum, as env.json records it for each tokenizer file.
std::string content_checksum(std::string_view content);
inline constexpr const char* kTokenizerSums = "tokenizer_crc32";  // the key in env.json

}  // namespace triad
