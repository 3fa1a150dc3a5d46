#include "engine/context.h"

#include "engine/check.h"
#include "engine/memory_log.h"
#include "engine/process/cpu_threads.h"

namespace triad {

namespace {
// Stream priorities; when SMs become free, kernels on a stream with a higher priority start first. A context's own
// stream is above its side streams, because the step's critical path is on it. The last side stream is for short work,
// which should not wait for another side stream's long kernel to end.
constexpr int kPriority = 2, kSidePriority[] = {0, 0, 1};
}  // namespace

Runtime::Runtime(const Options& o)
    : arena_(o.planning ? Arena::planned(o.device) : Arena(o.device, o.arena_bytes)),
      scratch_(arena_, o.scratch_bytes),
      stream_(o.planning ? Device::cpu() : o.device, "compute", kPriority),
      routes_(o.kernels, o.strict),
      ctx_{.device = o.device,
           .stream = stream_,
           .scratch = scratch_,
           .blas = blas_,
           .routes = routes_,
           .threads = cpu_threads(),
           .planning = o.planning,
           .listeners = &listeners_} {
  if (!o.planning) {
    memory_log_ = std::make_unique<MemoryLog>(routes_);
    scratch_.set_log(memory_log_.get());
    listeners_.push_back(memory_log_.get());
  }
  if (!o.device.is_cuda()) return;
  if (o.side_streams) {
    for (const int priority : kSidePriority)
      sides_.emplace_back(stream_.device(), "side " + std::to_string(sides_.size()), priority);
    ctx_.sides = &sides_;
  }
  DeviceInfo info;
  info.num_sms = 132, info.compute_capability = 90;  // a plan without a GPU assumes an H200's numbers
  if (backend::cuda_device_count() > 0) info = backend::info(o.device);
  ctx_.num_sms = info.num_sms;
  ctx_.compute_capability = info.compute_capability;
}

Runtime::~Runtime() = default;

namespace {

// Calls body(byte offset in a, byte offset in b, bytes) for each longest span that is contiguous in both views, which
// have the same shape.
template <class A, class B, class Body>
void for_each_run(const A& a, const B& b, Body&& body) {
  int outer = a.rank;  // the axes [outer, rank) are one contiguous span in both views
  int64_t run = 1, runs = 1;
  while (outer > 0 && (a.dim[outer - 1] == 1 || (a.stride[outer - 1] == run && b.stride[outer - 1] == run)))
    run *= a.dim[--outer];
  for (int i = 0; i < outer; ++i) runs *= a.dim[i];
  const int64_t element = size_of(a.dtype);
  for (int64_t n = 0; n < runs && run > 0; ++n) {
    int64_t left = n, offset_a = 0, offset_b = 0;
    for (int i = outer - 1; i >= 0; --i) {
      offset_a += left % a.dim[i] * a.stride[i];
      offset_b += left % a.dim[i] * b.stride[i];
      left /= a.dim[i];
    }
    body(offset_a * element, offset_b * element, run * element);
  }
}

}  // namespace

void copy(Context& ctx, Tensor dst, ConstTensor src) {
  TRIAD_CHECK(dst.shape() == src.shape() && dst.dtype == src.dtype, "copy from {} to {}", src.str(), dst.str());
  if (ctx.planning) return;
  for_each_run(dst, src, [&](int64_t to, int64_t from, int64_t bytes) {
    backend::copy(dst.data + to, dst.device, src.data + from, src.device, bytes, ctx.stream.handle());
  });
}

void zero(Context& ctx, Tensor t) {
  if (ctx.planning) return;
  for_each_run(t, t, [&](int64_t at, int64_t, int64_t bytes) {
    backend::fill(t.data + at, t.device, 0, bytes, ctx.stream.handle());
  });
}

void read(Context& ctx, void* host, ConstTensor src) {
  TRIAD_CHECK(src.contiguous(), "a strided view {} was read to the host", src.str());
  if (ctx.planning) return;
  backend::copy(static_cast<std::byte*>(host), Device::cpu(), src.data, src.device, src.bytes(), ctx.stream.handle());
  ctx.stream.synchronize();
}

void write(Context& ctx, Tensor dst, const void* host) {
  TRIAD_CHECK(dst.contiguous(), "a strided view {} was written from the host", dst.str());
  if (ctx.planning) return;
  backend::copy(dst.data, dst.device, static_cast<const std::byte*>(host), Device::cpu(), dst.bytes(),
                ctx.stream.handle());
  ctx.stream.synchronize();
}

}  // namespace triad
