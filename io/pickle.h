// Writes Python's pickle format, protocol 2, with only the opcodes that PyTorch's memory viewer accepts (io/README.md).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace triad {

// Writes values in sequence. In a dict, keys and values alternate. Each call to a begin_ function needs a call to its
// end_ function.
class PickleWriter {
 public:
  PickleWriter();

  void begin_dict();
  void end_dict();
  void begin_list();
  void end_list();

  void boolean(bool);
  void integer(int64_t);
  void number(double);
  void text(std::string_view);               // UTF-8; a repeated text is written as a reference to the first one
  void pair(int64_t first, int64_t second);  // a tuple

  // Writes a key and its value.
  void entry(std::string_view key, int64_t value) { text(key), integer(value); }
  void entry(std::string_view key, std::string_view value) { text(key), text(value); }
  void flag(std::string_view key, bool value) { text(key), boolean(value); }

  // For a list or dict that occurs several times: `if (!again(name)) { ...write it...; keep(name); }`. `name`
  // identifies it within this writer and is not written.
  bool again(const std::string& name);
  void keep(const std::string& name);

  std::string finish();  // the file's bytes

 private:
  // Every value is written after a call to item(). In a list, which is written in batches, it begins a new batch where
  // needed.
  void item();
  void little_endian(uint64_t value, int bytes);
  void put();
  void get(uint32_t id);

  struct Open {
    bool list;
    int64_t items = 0;
  };
  std::string out_;
  std::vector<Open> open_;
  std::unordered_map<std::string, uint32_t> texts_, kept_;
  uint32_t next_id_ = 0;
};

}  // namespace triad
