#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "engine/check.h"
#include "engine/comm/link.h"
#include "engine/comm/mpi_functions.h"

namespace triad {

namespace {

struct Loaded {
  const MpiFunctions* functions = nullptr;
  std::string error;
};

Loaded load() {
  std::error_code unknown;
  const std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe", unknown).parent_path();
  std::string library = (folder / "libtriad_mpi.so").string();
  if (!std::filesystem::exists(library, unknown))
    library = (folder.parent_path() / "lib/triad/libtriad_mpi.so").string();
  if (!std::filesystem::exists(library, unknown))
    return {nullptr,
            "this build has no MPI: torchrun and srun start its ranks without it (a build from source has MPI where "
            "libopenmpi-dev and openmpi-bin were installed when it was configured)"};
  // RTLD_GLOBAL, because the plugins that MPI loads need its symbols.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) return {nullptr, std::string(dlerror()) + " (openmpi-bin has it, if that is Open MPI's)"};
  const auto* functions = static_cast<const MpiFunctions*>(dlsym(handle, kMpiFunctionsSymbol));
  if (functions == nullptr) return {nullptr, dlerror()};
  return {functions, ""};
}

class MpiLink final : public Link {
 public:
  MpiLink(const MpiFunctions& functions, const LaunchEnv& env) : mpi_(functions) {
    int rank = 0, world = 0;
    mpi_.init(&rank, &world);
    if (rank != env.rank || world != env.world)
      fail(
          "MPI ({}) says rank {} of {}, but {}'s variables say rank {} of {}: the program was built with another MPI "
          "than the launcher's",
          mpi_.version(), rank, world, env.launcher, env.rank, env.world);
  }
  std::string name() const override { return mpi_.version(); }
  void all_gather(const void* mine, void* all, int64_t bytes) override {
    mpi_.all_gather(communicator_, mine, all, bytes);
  }
  void all_to_all(const void* to, void* from, int64_t bytes) override {
    mpi_.all_to_all(communicator_, to, from, bytes);
  }
  std::unique_ptr<Link> group(const std::vector<int>& ranks) override {
    return std::unique_ptr<Link>(new MpiLink(mpi_, mpi_.split(/*color=*/ranks.front())));
  }
  void finish() override { mpi_.finalize(); }

 private:
  MpiLink(const MpiFunctions& functions, int communicator) : mpi_(functions), communicator_(communicator) {}

  const MpiFunctions& mpi_;
  int communicator_ = 0;  // MpiFunctions' number for it
};

}  // namespace

std::string why_no_mpi() { return load().error; }

std::unique_ptr<Link> open_mpi_link(const LaunchEnv& env) {
  const Loaded loaded = load();
  if (loaded.functions == nullptr) fail("MPI cannot be used: {}", loaded.error);
  return std::make_unique<MpiLink>(*loaded.functions, env);
}

}  // namespace triad
