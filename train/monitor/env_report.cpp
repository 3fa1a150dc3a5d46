#include "train/monitor/env_report.h"

#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <zlib.h>

#include "engine/backend.h"
#include "engine/units.h"
#include "kernels/common/blas_core.h"
#include "kernels/ops/linear_fp8.h"
#include "kernels/ops/matmul.h"
#include "train/config/load_config.h"

namespace triad {

namespace {

Json library_versions(Device device) {
  return {{"matrix products", matmul_libraries(device)},
          {"OpenBLAS kernels", blas_core()},
          {"fmt", FMT_VERSION},
          {"nlohmann_json", fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                                        NLOHMANN_JSON_VERSION_PATCH)},
          {"zlib", zlibVersion()}};
}

}  // namespace

Json environment_report(Device device, const Comm& comm, const std::string& build) {
  const DeviceInfo info = backend::info(device);
  utsname machine{};
  uname(&machine);
  Json report = {{"build", build},
                 {"host", machine.nodename},
                 {"libraries", library_versions(device)},
                 {"kernel", std::string(machine.sysname) + " " + machine.release},
                 {"cpu", backend::info(Device::cpu()).name},
                 {"cpu_threads", sysconf(_SC_NPROCESSORS_ONLN)},
                 {"device", device.str()},
                 {"device_name", info.name},
                 {"device_memory_mib", static_cast<double>(info.memory_bytes) / kMiB}};
  if (device.is_cuda()) {
    report["compute_capability"] = info.compute_capability;
    report["fp8"] = info.compute_capability == kFp8Capability;
    report["num_sms"] = info.num_sms;
    report["cuda_driver"] = info.driver;
    report["cuda_runtime"] = info.runtime;
  }
  report["world"] = comm.world();
  report["comm"] = comm.name();
  for (const Peer& p : comm.peers())
    report["ranks"].push_back(
        {{"rank", p.rank}, {"host", p.host}, {"local_rank", p.local_rank}, {"device", p.device}, {"pci", p.pci}});
  report["environment"] = shown_environment();
  return report;
}

}  // namespace triad
