// Python's pickle format, protocol 2: as much of it as PyTorch's memory viewer understands (FORMATS.md section 1d).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace triad {

// Values are written one behind the other. In a dict keys and values take turns; what a list begins it has to end.
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
  void text(std::string_view);               // UTF-8; written once, then referred to
  void pair(int64_t first, int64_t second);  // a tuple

  // A key with its value.
  void entry(std::string_view key, int64_t value) { text(key), integer(value); }
  void entry(std::string_view key, std::string_view value) { text(key), text(value); }
  void flag(std::string_view key, bool value) { text(key), boolean(value); }

  // A list or dict that comes again: `if (!again(name)) { ...write it...; keep(name); }`. Names are of this writer's
  // use alone.
  bool again(const std::string& name);
  void keep(const std::string& name);

  std::string finish();  // the bytes of the file

 private:
  void item();  // before each value: a list takes its items in batches
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
