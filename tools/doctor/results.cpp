// Writes RESULTS.md: a table with a row per phase, then the last output from each phase that did not pass.
#include <algorithm>
#include <ctime>

#include "engine/process/counted.h"
#include "io/file.h"
#include "tools/doctor/doctor.h"
#include "tools/version.h"

namespace triad {

namespace {

// Escapes text for a Markdown table cell.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '|' || c == '<') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

std::string now() {
  char text[32];
  const std::time_t time = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&time, &utc);
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &utc);
  return text;
}

std::string machine_line(const Json& m) {
  if (m.is_null()) return "unknown: the phase environment did not complete";
  std::string text = fmt::format("{}, {}, {}", m["host"].get<std::string>(), m["cpu"].get<std::string>(),
                                 counted(m["cores"].get<int>(), "core"));
  for (const Json& gpu : m["gpus"]) text += ", " + gpu["name"].get<std::string>();
  return text + (m["gpus"].empty() ? ", no GPU" : ", driver " + m["driver_version"].get<std::string>());
}

}  // namespace

void write_results(const DoctorOptions& o, const std::vector<PhaseResult>& all, const Json& machine) {
  std::string build = version_text();
  for (size_t at; (at = build.find('\n')) != std::string::npos;) build.replace(at, 1, "; ");
  std::string text = fmt::format("{}\n\n{}; {}\n\nMachine: {}\n\n", kResultsTitle, now(), build, machine_line(machine));
  for (const Verdict verdict : {Verdict::pass, Verdict::fail, Verdict::slow, Verdict::hang, Verdict::skipped})
    text += fmt::format(
        "{}{} {}", verdict == Verdict::pass ? "" : ", ",
        std::count_if(all.begin(), all.end(), [&](const PhaseResult& d) { return d.finding.verdict == verdict; }),
        word_of(verdict));
  text +=
      "\n\n| phase | question | verdict | s (budget) | evidence | what to do next |\n| --- | --- | --- | --- | --- | "
      "--- |\n";
  for (const auto& [phase, finding] : all)
    text += fmt::format("| [{0}]({0}/) | {1} | **{2}** | {3:.1f} ({4:.0f}) | {5} | {6} |\n", phase->name,
                        cell(phase->question), word_of(finding.verdict), finding.seconds, phase->budget_s * o.budget,
                        cell(finding.evidence), finding.next.empty() ? "nothing" : cell(finding.next));
  text +=
      "\nPASS: every check holds. FAIL: a check does not hold. SLOW: every check holds, but the phase took longer than "
      "its budget; or the phase still ran at three times its budget and was killed. HANG: the phase showed no sign of "
      "life and was killed. SKIPPED: this machine or build lacks what the phase needs, or an earlier phase whose files "
      "it reads did not complete. The folder of each phase holds env.json, the files of its run, and output.txt with "
      "everything that it printed.\n";
  constexpr size_t kLines = 25;
  for (const auto& [phase, finding] : all) {
    if (finding.verdict == Verdict::pass || finding.verdict == Verdict::skipped) continue;
    const std::string printed = tail(o.out + "/" + phase->name + "/output.txt", kLines);
    text += fmt::format("\n## {}: {}\n\n```\n{}```\n", phase->name, word_of(finding.verdict),
                        printed.empty() ? "nothing was printed\n" : printed);
  }
  write_file_atomically(o.out + "/" + kResultsFile, text);
}

}  // namespace triad
