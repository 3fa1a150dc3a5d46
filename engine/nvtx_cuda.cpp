#include <nvtx3/nvToolsExt.h>

#include "engine/nvtx.h"

namespace triad {

namespace {
class Nvtx final : public OpListener {
 public:
  void begin(const char* op) override { nvtxRangePushA(op); }
  void end() override { nvtxRangePop(); }
};
}  // namespace

std::unique_ptr<OpListener> nvtx_listener() { return std::make_unique<Nvtx>(); }

}  // namespace triad
