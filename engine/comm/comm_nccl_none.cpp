// comm.h's NCCL functions in a build without NCCL.
#include "engine/check.h"
#include "engine/comm/comm.h"

namespace triad {

std::string why_no_nccl() { return "this build has no NCCL (its header nccl.h was not found when it was configured)"; }

std::unique_ptr<Comm> make_nccl_comm(const LaunchEnv&, Device, std::unique_ptr<Link>, double) {
  fail("NCCL cannot be used: {}", why_no_nccl());
}

}  // namespace triad
