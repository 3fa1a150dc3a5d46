#include "tests/support/disk_record.h"

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "io/file.h"
#include "tests/support/program.h"

namespace triad::test {

namespace fs = std::filesystem;

namespace {

using Node = std::shared_ptr<DiskNode>;
using Kind = DiskNode::Kind;

// Which changes in each unsynced folder are on the disk, and whether files' unsynced bytes are.
struct Loss {
  bool bytes_kept = false;
  std::map<const DiskNode*, DiskNode::Entries> entries;  // only folders with unsynced changes
};

class Disk {
 public:
  explicit Disk(std::string root) : root_path_(std::move(root)), root_(std::make_shared<DiskNode>()) {
    root_->kind = Kind::folder;
  }

  void apply(const DiskRecord::Call& call) {
    if (call.path == root_path_ && call.what == "mkdir") return;
    if (call.what == "sync") return sync(*at(call.path));
    if (call.what == "write" || call.what == "cut") return write(*at(call.path), call);
    const auto [folder, name] = place_of(call.path);
    if (call.what == "create" || call.what == "mkdir" || call.what == "symlink") {
      const Node node = std::make_shared<DiskNode>();
      node->kind = call.what == "create" ? Kind::file : call.what == "mkdir" ? Kind::folder : Kind::link;
      node->bytes = call.what == "symlink" ? "-> " + call.other : "";
      node->hash = std::hash<std::string>()(node->bytes);
      if (node->kind != Kind::folder) sync(*node);
      return change(*folder, {{name, node}});
    }
    if (call.what == "remove") return change(*folder, {{name, nullptr}});
    const auto [to, to_name] = place_of(call.other);
    if (folder != to) throw std::runtime_error("not simulated: a rename from one folder to another: " + call.path);
    const Node moved = folder->entries.at(name);
    if (call.what == "exchange") return change(*folder, {{name, to->entries.at(to_name)}, {to_name, moved}});
    if (is_temporary(name) && !is_temporary(to_name) && moved->hash != moved->synced_hash) torn_.push_back(call.other);
    change(*folder, {{name, nullptr}, {to_name, moved}});
  }

  // What a crash now may lose below a folder: all, none, all but one, or one of each folder's unsynced changes; all or
  // none of the files' unsynced bytes.
  std::vector<Loss> losses(const std::string& below) const {
    std::set<const DiskNode*> found;
    find_unsynced(*at(below), found);
    const std::vector<const DiskNode*> unsynced(found.begin(), found.end());
    std::vector<Loss> all;
    for (const bool bytes_kept : {false, true})
      for (size_t kept = 0; kept < size_t{1} << unsynced.size(); ++kept) {
        Loss loss{.bytes_kept = bytes_kept, .entries = {}};
        for (size_t i = 0; i < unsynced.size(); ++i)
          loss.entries[unsynced[i]] = (kept >> i & 1) != 0 ? unsynced[i]->entries : unsynced[i]->synced_entries;
        all.push_back(loss);
        for (size_t i = 0; i < unsynced.size(); ++i) {
          const DiskNode& folder = *unsynced[i];
          const bool has_all = (kept >> i & 1) != 0;
          for (const std::vector<std::string>& names : folder.pending) {
            Loss but_one = loss;
            set_names(but_one.entries[&folder], has_all ? folder.synced_entries : folder.entries, names);
            all.push_back(but_one);
          }
        }
      }
    return all;
  }

  // Calls f(path, bytes, hash of the bytes) for everything below a folder.
  template <class F>
  void for_each(const std::string& below, const Loss& loss, F&& f) const {
    visit(*at(below), "", loss, f);
  }
  DiskRecord::Tree tree(const std::string& below, const Loss& loss) const {
    DiskRecord::Tree tree;
    for_each(below, loss, [&](const std::string& path, const std::string& bytes, size_t) { tree[path] = bytes; });
    return tree;
  }
  bool has(const std::string& path, bool synced) const {
    Node node = root_;
    for (const fs::path& part : fs::path(path).lexically_relative(root_path_)) {
      if (part == ".") continue;
      const DiskNode::Entries& entries = synced ? node->synced_entries : node->entries;
      const auto it = entries.find(part.string());
      if (it == entries.end()) return false;
      node = it->second;
    }
    return true;
  }
  Loss no_loss() const {
    std::set<const DiskNode*> found;
    find_unsynced(*root_, found);
    Loss none{.bytes_kept = true, .entries = {}};
    for (const DiskNode* folder : found) none.entries[folder] = folder->entries;
    return none;
  }
  const std::vector<std::string>& torn() const { return torn_; }

 private:
  static void set_names(DiskNode::Entries& to, const DiskNode::Entries& from, const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      const auto it = from.find(name);
      if (it == from.end())
        to.erase(name);
      else
        to[name] = it->second;
    }
  }

  // Includes folders still on the disk although they have been removed or renamed since.
  static void find_unsynced(const DiskNode& folder, std::set<const DiskNode*>& found) {
    if (!folder.pending.empty()) found.insert(&folder);
    for (const DiskNode::Entries* entries : {&folder.entries, &folder.synced_entries})
      for (const auto& [name, node] : *entries)
        if (node->kind == Kind::folder) find_unsynced(*node, found);
  }

  Node at(const std::string& path) const {
    Node node = root_;
    for (const fs::path& part : fs::path(path).lexically_relative(root_path_)) {
      if (part == ".") continue;
      const auto it = node->entries.find(part.string());
      if (it == node->entries.end()) throw std::runtime_error("the record does not say who made " + path);
      node = it->second;
    }
    return node;
  }
  std::pair<Node, std::string> place_of(const std::string& path) const {
    return {at(fs::path(path).parent_path().string()), fs::path(path).filename().string()};
  }

  static void change(DiskNode& folder, const std::vector<std::pair<std::string, Node>>& changes) {
    std::vector<std::string> names;
    for (const auto& [name, node] : changes) {
      names.push_back(name);
      if (node == nullptr)
        folder.entries.erase(name);
      else
        folder.entries[name] = node;
    }
    folder.pending.push_back(names);
  }

  static void sync(DiskNode& node) {
    node.synced_bytes = node.bytes, node.synced_hash = node.hash;
    node.synced_entries = node.entries;
    node.pending.clear();
  }

  static void write(DiskNode& file, const DiskRecord::Call& call) {
    const auto begin = static_cast<size_t>(call.number), end = begin + call.bytes.size();
    if (call.what == "cut" || file.bytes.size() < end) file.bytes.resize(end);
    file.bytes.replace(begin, call.bytes.size(), call.bytes);
    file.hash = std::hash<std::string>()(file.bytes);
  }

  template <class F>
  static void visit(const DiskNode& folder, const std::string& prefix, const Loss& loss, F& f) {
    const auto changed = loss.entries.find(&folder);
    for (const auto& [name, node] : changed != loss.entries.end() ? changed->second : folder.synced_entries) {
      const std::string path = prefix + name;
      if (node->kind == Kind::folder) {
        f(path + "/", "", 0);
        visit(*node, path + "/", loss, f);
      } else {
        f(path, loss.bytes_kept ? node->bytes : node->synced_bytes, loss.bytes_kept ? node->hash : node->synced_hash);
      }
    }
  }

  std::string root_path_;
  Node root_;
  std::vector<std::string> torn_;
};

}  // namespace

DiskRecord::DiskRecord(std::string folder) : folder_(std::move(folder)) {
  std::istringstream record(read_text(folder_ + ".record"));
  for (std::string line; std::getline(record, line);) {
    std::istringstream words(line);
    std::vector<std::string> all;
    for (std::string word; std::getline(words, word, '\t');) all.push_back(word);
    Call call{.what = all.at(0), .path = all.at(1), .other = {}, .number = 0, .bytes = {}};
    if (all.size() > 3) call.other = all[2];
    if (call.what == "write" || call.what == "cut") call.number = std::stoll(call.other);
    call.bytes.resize(std::stoul(all.back()));
    record.read(call.bytes.data(), static_cast<std::streamsize>(call.bytes.size()));
    calls_.push_back(std::move(call));
  }
}

void DiskRecord::for_each_crash(const std::string& below,
                                const std::function<std::optional<int64_t>(const Call&)>& promise_of,
                                const std::function<void(size_t calls, int64_t promised, const Tree&)>& f) const {
  Disk disk(folder_);
  std::set<size_t> seen;
  int64_t promised = -1;
  for (size_t i = 0; i < calls_.size(); ++i) {
    disk.apply(calls_[i]);
    promised = promise_of(calls_[i]).value_or(promised);
    const auto is_new = [&](const std::string& text) {
      return seen.insert(std::hash<std::string>()(std::to_string(promised) + text)).second;
    };
    if (!disk.has(below, /*synced=*/true) && is_new("")) f(i + 1, promised, {});
    if (!disk.has(below, /*synced=*/false)) continue;
    for (const Loss& loss : disk.losses(below)) {
      std::string text = "\n";
      disk.for_each(below, loss, [&](const std::string& path, const std::string&, size_t hash) {
        text += path + '\0' + std::to_string(hash) + '\n';
      });
      if (!is_new(text)) continue;
      f(i + 1, promised, disk.tree(below, loss));
    }
  }
}

std::vector<std::string> DiskRecord::torn() const {
  Disk disk(folder_);
  for (const Call& call : calls_) disk.apply(call);
  return disk.torn();
}

void DiskRecord::for_each_call(const std::function<void(const Call&, const Tree&)>& f) const {
  Disk disk(folder_);
  for (const Call& call : calls_) {
    disk.apply(call);
    f(call, disk.tree(folder_, disk.no_loss()));
  }
}

DiskRecord::Tree DiskRecord::synced(size_t calls) const {
  Disk disk(folder_);
  for (size_t i = 0; i < calls; ++i) disk.apply(calls_[i]);
  return disk.tree(folder_, {});
}

DiskRecord::Tree DiskRecord::whole() const {
  Disk disk(folder_);
  for (const Call& call : calls_) disk.apply(call);
  return disk.tree(folder_, disk.no_loss());
}

DiskRecord::Tree read_tree(const std::string& folder) {
  DiskRecord::Tree tree;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    const std::string path = entry.path().lexically_relative(folder).string();
    if (entry.is_symlink())
      tree[path] = "-> " + fs::read_symlink(entry.path()).string();
    else if (entry.is_directory())
      tree[path + "/"] = "";
    else
      tree[path] = read_text(entry.path().string());
  }
  return tree;
}

void write_tree(const std::string& folder, const DiskRecord::Tree& tree) {
  fs::create_directories(folder);
  for (const auto& [path, bytes] : tree) {
    const std::string place = folder + "/" + path;
    if (path.ends_with('/'))
      fs::create_directories(place);
    else if (bytes.starts_with("-> "))
      fs::create_symlink(bytes.substr(3), place);
    else
      write_text(place, bytes);
  }
}

}  // namespace triad::test
