#include "tools/version.h"

#include <fmt/format.h>
#include <revision.h>  // defines TRIAD_GIT; the build generates it

#include "engine/backend.h"
#include "engine/with_cuda.h"

namespace triad {

std::string version_text() {
  return fmt::format("triad {} ({})\nbuild: {}\nCUDA: {}", TRIAD_VERSION, TRIAD_GIT, TRIAD_BUILD,
                     backend::built_with_cuda() ? "yes" : "no, CPU only");
}

std::string git_revision() { return TRIAD_GIT; }

}  // namespace triad
