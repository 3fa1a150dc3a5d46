// Results that a reader may use while they are made: lines on standard output, each whole or not at all.
#pragma once
#include <string_view>

namespace triad {

// Writes a line with its newline. If the disk is full, the part that it has taken is cut off again; throws an Error.
void write_whole_line(std::string_view line);

// While it exists, SIGINT and SIGTERM do not end the process: requested() says that one has come, and the caller ends
// between two lines with end(), as the signal would have ended it. A second signal ends the process at once.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  bool requested() const;
  [[noreturn]] void end() const;
};

}  // namespace triad
