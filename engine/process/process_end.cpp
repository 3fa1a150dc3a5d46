#include "engine/process/process_end.h"

#include <unistd.h>

#include <chrono>
#include <system_error>
#include <thread>

namespace triad {

bool end_process_within(double seconds) {
  try {
    std::thread([seconds] {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      _exit(1);
    }).detach();
    return true;
  } catch (const std::system_error&) { return false; }
}

}  // namespace triad
