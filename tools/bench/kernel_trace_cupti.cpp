// KernelTrace by CUPTI's activity records. The library is opened when the first trace starts, so that triad also runs
// on machines without it.
#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

#include "engine/check.h"
#include "tools/bench/kernel_trace.h"

namespace triad {

namespace {

// CUPTI's functions, found in the library at run time.
struct Cupti {
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks;
  decltype(&cuptiActivityEnable) enable;
  decltype(&cuptiActivityDisable) disable;
  decltype(&cuptiActivityFlushAll) flush_all;
  decltype(&cuptiActivityGetNextRecord) next_record;
  decltype(&cuptiActivityPushExternalCorrelationId) push_id;
  decltype(&cuptiActivityPopExternalCorrelationId) pop_id;
  decltype(&cuptiGetResultString) result_string;

  static const Cupti& get() {
    static const Cupti cupti = open();
    return cupti;
  }
  void check(CUptiResult result, const char* call) const {
    if (result == CUPTI_SUCCESS) return;
    const char* text = "";
    result_string(result, &text);
    fail("kernels cannot be traced: CUPTI's {}: {}", call, text);
  }

 private:
  static Cupti open() {
    void* library = nullptr;
    for (const char* name : {TRIAD_CUPTI_SONAME, TRIAD_CUPTI_LIBRARY})
      if (library == nullptr) library = dlopen(name, RTLD_NOW);
    if (library == nullptr)
      fail(
          "kernels cannot be traced: {} cannot be opened (neither in the loader's paths, LD_LIBRARY_PATH among them, "
          "nor as {})",
          TRIAD_CUPTI_SONAME, TRIAD_CUPTI_LIBRARY);
    Cupti c{};
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) fail("kernels cannot be traced: {} has no {}", TRIAD_CUPTI_SONAME, name);
    };
    find(c.register_callbacks, "cuptiActivityRegisterCallbacks");
    find(c.enable, "cuptiActivityEnable");
    find(c.disable, "cuptiActivityDisable");
    find(c.flush_all, "cuptiActivityFlushAll");
    find(c.next_record, "cuptiActivityGetNextRecord");
    find(c.push_id, "cuptiActivityPushExternalCorrelationId");
    find(c.pop_id, "cuptiActivityPopExternalCorrelationId");
    find(c.result_string, "cuptiGetResultString");
    return c;
  }
};

// Shortens "void triad::cuda::(anonymous namespace)::select_kernel<float, 4>(Select<float>)" to "select_kernel".
std::string short_name(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  std::string name = status == 0 ? text.get() : mangled;
  for (const char* anonymous : {"(anonymous namespace)::", "<unnamed>::"})
    for (size_t at; (at = name.find(anonymous)) != std::string::npos;) name.erase(at, std::string(anonymous).size());
  name = name.substr(0, name.find_first_of("<("));
  const size_t space = name.rfind(' '), scope = name.rfind("::");
  if (space != std::string::npos) name.erase(0, space + 1);
  return scope == std::string::npos ? name
                                    : name.substr(name.rfind("::") == std::string::npos ? 0 : name.rfind("::") + 2);
}

constexpr CUpti_ActivityKind kKinds[] = {
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
    CUPTI_ACTIVITY_KIND_MEMCPY,
    CUPTI_ACTIVITY_KIND_MEMSET,
    CUPTI_ACTIVITY_KIND_RUNTIME,  // API call records, which link a kernel to its op's external id
    CUPTI_ACTIVITY_KIND_DRIVER,
    CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION};

}  // namespace

// Receives CUPTI's records. CUPTI's callbacks have no user argument, so they find the Recorder in the static `running`;
// therefore only one trace can run at a time.
class KernelTrace::Recorder final : public OpListener {
 public:
  Recorder() : cupti_(Cupti::get()) {
    TRIAD_CHECK(running == nullptr, "two traces of kernels at a time");
    running = this;
    cupti_.check(cupti_.register_callbacks(buffer_wanted, buffer_full), "cuptiActivityRegisterCallbacks");
    for (const CUpti_ActivityKind kind : kKinds) cupti_.check(cupti_.enable(kind), "cuptiActivityEnable");
  }
  ~Recorder() override {
    if (running == this) stop();
  }
  Recorder(const Recorder&) = delete;

  void begin(const char* op) override {
    const auto [known, fresh] = ids_.try_emplace(op, ops_.size());
    if (fresh) ops_.push_back(op);
    cupti_.push_id(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, known->second);
  }
  void end() override {
    uint64_t id = 0;
    cupti_.pop_id(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &id);
  }

  std::vector<Activity> finish() {
    stop();
    std::vector<Activity> all;
    for (Found& found : found_) {
      const auto op = op_of_call_.find(found.call);
      if (op != op_of_call_.end()) found.activity.op = ops_[op->second];
      all.push_back(std::move(found.activity));
    }
    std::sort(all.begin(), all.end(), [](const Activity& a, const Activity& b) { return a.begin_ns < b.begin_ns; });
    return all;
  }

 private:
  struct Found {
    uint32_t call;  // correlation id from the API call that queued the kernel
    Activity activity;
  };

  void stop() {
    cupti_.flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    for (const CUpti_ActivityKind kind : kKinds) cupti_.disable(kind);
    running = nullptr;
  }

  void read(uint8_t* buffer, size_t bytes) {
    CUpti_Activity* record = nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    while (cupti_.next_record(buffer, bytes, &record) == CUPTI_SUCCESS) {
      switch (record->kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
          const auto& k = *reinterpret_cast<const CUpti_ActivityKernel10*>(record);
          add(k.correlationId, short_name(k.name), k.start, k.end, k.streamId);
          break;
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY: {
          const auto& c = *reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
          add(c.correlationId, "copy", c.start, c.end, c.streamId);
          break;
        }
        case CUPTI_ACTIVITY_KIND_MEMSET: {
          const auto& f = *reinterpret_cast<const CUpti_ActivityMemset4*>(record);
          add(f.correlationId, "fill", f.start, f.end, f.streamId);
          break;
        }
        case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
          const auto& e = *reinterpret_cast<const CUpti_ActivityExternalCorrelation*>(record);
          op_of_call_[e.correlationId] = e.externalId;
          break;
        }
        default:
          break;
      }
    }
  }
  void add(uint32_t call, std::string kernel, uint64_t begin, uint64_t end, uint32_t stream) {
    found_.push_back({call, {std::move(kernel), "", static_cast<int64_t>(begin), static_cast<int64_t>(end), stream}});
  }

  static void CUPTIAPI buffer_wanted(uint8_t** buffer, size_t* bytes, size_t* most_records) {
    constexpr size_t kBytes = size_t{8} << 20, kAlign = 64;
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(kAlign, kBytes));
    *bytes = *buffer == nullptr ? 0 : kBytes;
    *most_records = 0;
  }
  static void CUPTIAPI buffer_full(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid_bytes) {
    if (running != nullptr) running->read(buffer, valid_bytes);
    std::free(buffer);
  }

  static inline Recorder* running = nullptr;
  const Cupti& cupti_;
  std::mutex mutex_;
  std::map<std::string, uint64_t> ids_;
  std::vector<std::string> ops_;
  std::vector<Found> found_;
  std::unordered_map<uint32_t, uint64_t> op_of_call_;
};

KernelTrace::KernelTrace(Context& ctx) : ctx_(ctx) {
  TRIAD_CHECK(ctx.device.is_cuda(), "kernels can be traced on a GPU alone, not on {}", ctx.device.str());
  ctx.stream.synchronize();
  recorder_ = std::make_unique<Recorder>();
  ctx.listeners->push_back(recorder_.get());
}

KernelTrace::~KernelTrace() { std::erase(*ctx_.listeners, recorder_.get()); }

std::vector<Activity> KernelTrace::finish() {
  ctx_.stream.synchronize();
  std::erase(*ctx_.listeners, recorder_.get());
  return recorder_->finish();
}

}  // namespace triad
