// JSON lines: one object per line. Each line is appended by one write(2), so that another program can follow the file.
#pragma once
#include <cstdint>
#include <string>

#include "io/file.h"
#include "io/json_config.h"

namespace triad {

class JsonLines {
 public:
  // Appends to an existing file, after removing an unfinished last line.
  explicit JsonLines(const std::string& path);

  // Appends one object as a line. NaN and infinities become null; bytes that are not UTF-8 become U+FFFD.
  void append(const Json& object);

 private:
  AppendFile file_;
};

// Removes the lines of steps after this one; lines without a step stay. A missing file is no error.
void cut_jsonl(const std::string& path, int64_t step);

}  // namespace triad
