// Folders of checkpoints: whole or not at all, `latest`, what killed saves leave, which ones stay.
#include <filesystem>

#include "io/checkpoint.h"
#include "tests/program.h"
#include "tests/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

TEST_CASE("io: checkpoint folders", "[io]") {
  const TemporaryFolder folder;
  const std::string run = folder.path(), parent = folder.file("checkpoints");
  const auto save = [&](int step, const std::string& text) {
    return write_checkpoint(parent, "step_" + std::to_string(step), [&](const std::string& temporary) {
      CHECK(temporary != parent + "/step_" + std::to_string(step));
      write_text(temporary + "/model", text);
      write_text(temporary + "/state.json", text);
    });
  };
  CHECK(!find_newest_checkpoint(parent));
  check_error([&] { resolve_checkpoint(run); }, {run, "state.json"});
  check_error([&] { resolve_checkpoint(folder.file("none")); }, {"none", "no such folder"});
  CHECK(save(9, "nine") == parent + "/step_9");
  CHECK(save(10, "ten") == parent + "/step_10");
  CHECK(fs::read_symlink(parent + "/latest") == "step_10");
  for (const std::string& path : {run, run + "/", run + "/latest", parent, parent + "/latest", parent + "/step_10"})
    CHECK(resolve_checkpoint(path) == parent + "/step_10");
  CHECK(resolve_checkpoint(parent + "/step_9") == parent + "/step_9");
  CHECK(save(10, "ten again") == parent + "/step_10");  // replaces
  CHECK(read_text(parent + "/step_10/model") == "ten again");

  // A save that fails leaves the others, and nothing of its own.
  CHECK_THROWS_WITH(write_checkpoint(parent, "step_11", [](const std::string&) { fail("disk full"); }), "disk full");
  check_error([&] { write_checkpoint(parent, "step_11", [](const std::string&) {}); }, {"step_11", "state.json"});
  CHECK(count_files(parent) == 3);
  CHECK(find_newest_checkpoint(parent) == parent + "/step_10");

  // Killed at any moment: a half-written folder, a whole one not yet in place, one without a link to it.
  fs::create_directory(parent + "/step_12.tmp.4711");
  write_text(parent + "/step_12.tmp.4711/model", "half");
  fs::create_directory(parent + "/step_13.tmp.4711");
  write_text(parent + "/step_13.tmp.4711/state.json", "whole");
  fs::create_directory(parent + "/step_10.tmp.4711");  // the older one, exchanged
  write_text(parent + "/step_10.tmp.4711/state.json", "whole");
  fs::create_symlink("step_13", parent + "/latest.tmp.4711");
  write_text(parent + "/notes.tmp.1", "the user's");
  fs::create_directory(parent + "/step_99");  // not whole
  remove_leftovers(parent);
  CHECK(count_files(parent) == 6);
  CHECK(is_checkpoint(parent + "/step_13"));
  CHECK(read_text(parent + "/step_10/model") == "ten again");
  CHECK(find_newest_checkpoint(parent) == parent + "/step_10");
  const std::vector<CheckpointFolder> all = list_checkpoints(parent);
  REQUIRE(all.size() == 3);
  CHECK(all[0].step == 9);
  CHECK(all[2].step == 13);
  fs::remove_all(parent + "/step_10");  // the link dangles
  CHECK(resolve_checkpoint(run) == parent + "/step_13");
  CHECK(resolve_checkpoint(parent + "/latest") == parent + "/step_13");
  fs::remove(parent + "/latest");
  CHECK(resolve_checkpoint(run + "/latest") == parent + "/step_13");
}

TEST_CASE("io: old checkpoints go, the newest and every k-th stay", "[io]") {
  const TemporaryFolder folder;
  const std::string& parent = folder.path();
  const auto save = [&](int step) {
    write_checkpoint(parent, "step_" + std::to_string(step),
                     [](const std::string& temporary) { write_text(temporary + "/state.json", "{}"); });
  };
  const auto steps = [&] {
    std::vector<int64_t> all;
    for (const CheckpointFolder& c : list_checkpoints(parent)) all.push_back(c.step);
    return all;
  };
  for (int step = 1; step <= 7; ++step) save(step);
  thin_out_checkpoints(parent, 0, 0);
  CHECK(steps().size() == 7);
  thin_out_checkpoints(parent, 3, 2);
  CHECK(steps() == std::vector<int64_t>{2, 4, 5, 6, 7});
  save(3);  // `latest` points at it now, after a resume from an older one, say
  thin_out_checkpoints(parent, 1, 0);
  CHECK(steps() == std::vector<int64_t>{3, 7});
  CHECK(resolve_checkpoint(parent) == parent + "/step_3");
  CHECK(count_files(parent) == 3);
  // A removal that was killed has moved its folder aside; whole or not, the next save deals with it.
  fs::rename(parent + "/step_7", parent + "/step_7.tmp.1");
  fs::create_directory(parent + "/step_6.tmp.1");
  save(8);
  CHECK(steps() == std::vector<int64_t>{3, 7, 8});
  CHECK(count_files(parent) == 4);
}
