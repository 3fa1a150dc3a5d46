// DiskRecord: the calls by which a program has changed a folder (TRIAD_RECORD in tests/fault_injection/), and what a
// disk may hold if the power fails after any of them. A file system promises little: a file's bytes are on the disk
// once the file is synced, and a folder's entry (a new, renamed or removed name) once the folder is. What is not synced
// may be there or not, each change on its own.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace triad::test {

// A file, folder or link on the simulated disk.
struct DiskNode {
  using Entries = std::map<std::string, std::shared_ptr<DiskNode>>;
  enum class Kind { file, folder, link } kind = Kind::file;
  std::string bytes, synced_bytes;  // file contents; a link has its target in both
  size_t hash = 0, synced_hash = 0;
  Entries entries, synced_entries;                     // folder contents
  std::vector<std::vector<std::string>> pending = {};  // names that each call since the last sync has changed
};

class DiskRecord {
 public:
  struct Call {
    std::string what, path, other;
    int64_t number = 0;
    std::string bytes;
  };
  // Reads FOLDER.record. The folder was empty, or absent, when the record began.
  explicit DiskRecord(std::string folder);

  const std::string& folder() const { return folder_; }
  const std::vector<Call>& calls() const { return calls_; }
  // A file tree by path below the folder: "DIR/" for a folder, "-> " and the target for a link.
  using Tree = std::map<std::string, std::string>;
  // Calls f(number of calls done, promised, tree) for the states that the folder `below` may have on the disk after
  // each call; an empty tree if the folder itself may be lost. promised: the last value that promise_of(call) has
  // returned; it may be nullopt for calls that promise nothing. Each state with the same promise is passed once.
  void for_each_crash(const std::string& below, const std::function<std::optional<int64_t>(const Call&)>& promise_of,
                      const std::function<void(size_t calls, int64_t promised, const Tree&)>& f) const;
  // The files that had taken their name by a rename when not all their bytes were synced: a crash may leave them torn.
  std::vector<std::string> torn() const;
  // Calls f(call, the tree after it if nothing is lost).
  void for_each_call(const std::function<void(const Call&, const Tree&)>& f) const;
  // The tree after this many calls if everything unsynced is lost.
  Tree synced(size_t calls) const;
  // The tree after all calls if nothing is lost; equal to read_tree(folder), unless calls are missing in the record.
  Tree whole() const;

 private:
  std::string folder_;
  std::vector<Call> calls_;
};

DiskRecord::Tree read_tree(const std::string& folder);
void write_tree(const std::string& folder, const DiskRecord::Tree&);

}  // namespace triad::test
