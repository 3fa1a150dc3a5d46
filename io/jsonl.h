// JSON lines: one object a line, appended whole and at once, so that another program can follow the file.
#pragma once
#include <string>

#include "io/file.h"
#include "io/json_config.h"

namespace triad {

class JsonLines {
 public:
  // Goes on behind what is there; a last line that a killed run left unfinished is cut off.
  explicit JsonLines(const std::string& path);

  // Numbers that JSON has no word for (NaN, infinities) become null, bytes that are not UTF-8 become U+FFFD.
  void append(const Json& object);

 private:
  AppendFile file_;
};

}  // namespace triad
