#include "tools/version.h"

#include <fmt/format.h>
#include <revision.h>  // defines TRIAD_GIT; the build generates it

#include <filesystem>
#include <system_error>

#include "engine/backend.h"
#include "engine/comm/comm.h"
#include "engine/comm/link.h"
#include "engine/with_cuda.h"

namespace triad {

std::string version_text() {
  return fmt::format("triad {} ({})\nbuild: {}\nCUDA: {}", TRIAD_VERSION, TRIAD_GIT, TRIAD_BUILD,
                     backend::built_with_cuda() ? "yes" : "no, CPU only");
}

std::string version_and_parts() {
  const auto usable = [](const std::string& why_not) { return why_not.empty() ? "yes" : "no: " + why_not; };
  std::string text = fmt::format("{}\nMPI: {}\nNCCL: {}", version_text(), usable(why_no_mpi()),
                                 backend::built_with_cuda() ? usable(why_no_nccl()) : "no, it connects GPUs");
  std::error_code unknown;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", unknown),
                              configs = program.parent_path().parent_path() / "share/triad/configs";
  if (std::filesystem::is_directory(configs, unknown)) text += "\nexample configs: " + configs.string();
  return text;
}

std::string git_revision() { return TRIAD_GIT; }

}  // namespace triad
