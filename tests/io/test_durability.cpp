// What a power failure leaves: the calls that change files are recorded (tests/support/disk_record.h), and every state
// that the disk may have after each call is made again and read as a resume reads it.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "io/checkpoint.h"
#include "io/file.h"
#include "tests/support/disk_record.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

using Tree = DiskRecord::Tree;

int64_t step_in(const std::string& path) { return std::stoll(path.substr(path.rfind("step_") + 5)); }

// Files below one folder in a tree.
Tree below(const Tree& tree, const std::string& folder) {
  Tree part;
  for (const auto& [path, bytes] : tree)
    if (path.starts_with(folder + "/") && path.size() > folder.size() + 1) part[path.substr(folder.size() + 1)] = bytes;
  return part;
}

// Checks every crash in a record of checkpoints in `parent`: each folder that looks whole holds a save's files,
// `latest` leads to one, and a resume finds what was promised, or a later one.
void check_crashes(const DiskRecord& record, const std::string& parent,
                   const std::function<std::optional<int64_t>(const DiskRecord::Call&)>& promise_of) {
  // The folders as they were when a save renamed them.
  std::map<int64_t, std::set<Tree>> saved;
  record.for_each_call([&](const DiskRecord::Call& call, const Tree& whole) {
    const std::string target = fs::path(call.other).filename().string();
    if ((call.what == "rename" || call.what == "exchange") && fs::path(call.other).parent_path() == parent &&
        target.starts_with("step_") && !is_temporary(target))
      saved[step_in(target)].insert(below(whole, fs::path(call.other).lexically_relative(record.folder()).string()));
  });
  REQUIRE(saved.size() > 2);
  size_t crashes = 0, most_promised = 0;
  std::set<std::string> wrong;
  record.for_each_crash(parent, promise_of, [&](size_t calls, int64_t promised, const Tree& tree) {
    const TemporaryFolder folder;
    const std::string copy = folder.file("checkpoints");
    write_tree(copy, tree);
    const auto note = [&](const std::string& what) {
      if (wrong.size() < 10) wrong.insert("after call " + std::to_string(calls) + ": " + what);
    };
    const auto is_whole = [&](const std::string& path, int64_t step) {
      return fs::is_directory(path) && saved.contains(step) && saved[step].contains(read_tree(path));
    };
    // What a kill has left is completed or removed before anything else, and also by the next save.
    for (const bool cleaned : {false, true}) {
      if (cleaned) remove_leftovers(copy);
      for (const CheckpointFolder& each : list_checkpoints(copy))
        if (!is_whole(each.path, each.step)) note(each.path + " looks whole, but is not");
      if (const auto target = target_of_latest(copy); target && !is_whole(*target, step_in(*target)))
        note("latest points to " + *target + ", which is not whole");
      const std::optional<std::string> newest = find_newest_checkpoint(copy);
      if ((newest ? step_in(*newest) : -1) < promised)
        note("step " + std::to_string(promised) + " was promised, " + newest.value_or("nothing") + " is found");
    }
    ++crashes;
    most_promised = std::max<size_t>(most_promised, static_cast<size_t>(promised + 1));
  });
  INFO(crashes << " crashes");
  CHECK(wrong == std::set<std::string>());
  CHECK(crashes > 100);
  CHECK(most_promised > 2);
}

// The first test's calls, made in a separate process: three saves, the last replacing the second, with files that the
// caller has not synced.
void save_and_promise(const std::string& root) {
  const std::string parent = root + "/run/checkpoints";
  make_folders(root + "/run");  // synced into its parent, as a run's folder is
  AppendFile promised(root + "/promised");
  for (const int step : {1, 2, 3, 2, 4}) {
    const std::string name = fmt::format("step_{}", step);
    write_checkpoint(parent, name, [&](const std::string& folder) {
      AppendFile(folder + "/vocab.json").append(fmt::format("words of step {}", step));
      AppendFile(folder + "/merges.txt").append(fmt::format("merges of step {}", step));
      return fmt::format(R"({{"format": "triad checkpoint", "step": {}}})", step);
    });
    promised.append(name);
    thin_out_checkpoints(parent, 2, 0);
  }
  write_file_atomically(root + "/run/metrics.json", "{}");
}

}  // namespace

TEST_CASE("durability: after a power failure at any call a resume finds the checkpoint that was promised", "[io]") {
  if (const char* root = std::getenv("TRIAD_RECORD")) return save_and_promise(root);
  const TemporaryFolder folder;
  const std::string root = fs::canonical(folder.path()).string() + "/disk";
  fs::create_directory(root);
  const Outcome saved =
      run_command(with_faults("TRIAD_RECORD=" + root) + fs::read_symlink("/proc/self/exe").string() +
                  " 'durability: after a power failure at any call a resume finds the checkpoint that was promised'");
  INFO(saved.output);
  REQUIRE(saved.exit_code == 0);
  const DiskRecord record(root);
  CHECK(record.whole() == read_tree(root));  // otherwise calls are missing in the record
  CHECK(record.torn() == std::vector<std::string>());
  check_crashes(record, root + "/run/checkpoints", [](const DiskRecord::Call& call) {
    return call.what == "write" && call.path.ends_with("/promised") ? std::optional(step_in(call.bytes)) : std::nullopt;
  });
}

TEST_CASE("durability: after a power failure at any call of a run the run can go on", "[train]") {
  const TemporaryFolder folder;
  const std::string root = fs::canonical(folder.path()).string() + "/disk", out = root + "/runs/one";
  fs::create_directory(root);
  const std::string keys = "--set train.save_every=2 --set train.keep_last=1 --set train.eval_every=4 ";
  const Outcome trained =
      run_program(train_args(out, keys + "--set train.steps=6"), with_faults("TRIAD_RECORD=" + root));
  INFO(trained.output);
  REQUIRE(trained.exit_code == 0);
  const DiskRecord record(root);
  CHECK(record.whole() == read_tree(root));
  CHECK(record.torn() == std::vector<std::string>());
  // A save begins when the one before has been reported.
  check_crashes(record, out + "/checkpoints", [](const DiskRecord::Call& call) {
    const int64_t step = call.what == "mkdir" && has(call.path, "/step_") ? step_in(call.path) - 2 : -1;
    return step >= 0 ? std::optional(step) : std::nullopt;
  });
  // One crash as a user sees it: everything unsynced is lost midway through the last save.
  size_t middle = 0;
  for (size_t i = 0; i < record.calls().size(); ++i)
    if (record.calls()[i].what == "create" && has(record.calls()[i].path, "/step_6.tmp.")) middle = i;
  REQUIRE(middle > 0);
  const std::string copy = folder.file("copy");
  write_tree(copy, record.synced(middle));
  const Outcome resumed = run_program(train_args(copy + "/runs/one", keys + "--set train.steps=6 --resume latest"));
  INFO(resumed.output);
  CHECK(resumed.exit_code == 0);
  CHECK(same_file(copy + "/runs/one" + kWeights, out + kWeights));
}
