// A profiler for tests, which NVTX loads if NVTX_INJECTION64_PATH names it. For each range that begins or ends it
// writes a line to the file TRIAD_RANGES: the range's name, or "end", after one dot for each enclosing range.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace {

std::FILE* ranges_file = nullptr;
std::mutex mutex;
thread_local int depth = 0;

void write_line(int dots, const char* text) {
  const std::lock_guard lock(mutex);
  std::fprintf(ranges_file, "%s%s\n", std::string(static_cast<size_t>(dots), '.').c_str(), text);
  std::fflush(ranges_file);
}
int NVTX_API push(const char* name) {
  write_line(depth, name);
  return depth++;
}
int NVTX_API pop() {
  write_line(--depth, "end");
  return depth;
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const char* const path = std::getenv("TRIAD_RANGES");
  const auto* const callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (path == nullptr || callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0 || size <= NVTX_CBID_CORE_RangePop)
    return 0;
  ranges_file = std::fopen(path, "w");
  if (ranges_file == nullptr) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(&push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
  return 1;
}
