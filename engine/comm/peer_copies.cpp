#include "engine/comm/peer_copies.h"

#include <cuda.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/comm/launch_env.h"
#include "engine/cuda_check.h"

namespace triad {

namespace {

using StreamValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

// Looked up in the driver at run time, because the program does not link libcuda.
StreamValue find(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess) fail("the CUDA driver has no {}", name);
  return reinterpret_cast<StreamValue>(function);
}
void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) fail("{} failed with CUDA driver error {}", what, static_cast<int>(result));
}
void write_value(void* stream, std::byte* at, uint32_t value) {
  static const StreamValue write = find("cuStreamWriteValue32");
  check(write(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(at), value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue32");
}
void wait_value(void* stream, std::byte* at, uint32_t value, unsigned flags) {
  static const StreamValue wait = find("cuStreamWaitValue32");
  check(wait(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(at), value, flags), "cuStreamWaitValue32");
}

// The flags for waiting on another rank's counter. Work after the wait must see the copies that the other rank queued
// before it wrote the counter. The write follows a system-wide fence in its stream, so these copies have arrived by
// then. A GPU that may still reorder arrived writes internally reports that it can flush them, and then the wait
// flushes; other GPUs do not need it.
unsigned flags_of_waits(Device device) {
  int can_flush = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&can_flush, cudaDevAttrCanFlushRemoteWrites, device.index));
  return CU_STREAM_WAIT_VALUE_GEQ | (can_flush != 0 ? CU_STREAM_WAIT_VALUE_FLUSH : 0);
}

// Returns, on all ranks, the first rank's reason that there is; empty if none has.
std::string first_reason(Comm& comm, const std::string& own, const char* what) {
  const std::vector<std::string> all = comm.all_gather_host_text(own, what);
  for (size_t r = 0; r < all.size(); ++r)
    if (!all[r].empty()) return fmt::format("rank {}: {}", comm.peers()[r].rank, all[r]);
  return "";
}

// Makes the handle with which other ranks can open this rank's memory. Returns why it cannot be made; empty on success.
std::string why_no_offer(std::byte* base, cudaIpcMemHandle_t& offer) {
  const cudaError_t e = cudaIpcGetMemHandle(&offer, base);
  if (e == cudaSuccess) return "";
  cudaGetLastError();  // clears CUDA's error: sums then use NCCL
  return fmt::format("its memory cannot be shared: {}", cudaGetErrorString(e));
}

// Opens another rank's memory by its handle. Returns null and sets `why` on failure.
std::byte* open_memory(const cudaIpcMemHandle_t& handle, int rank, std::string& why) {
  void* p = nullptr;
  const cudaError_t e = cudaIpcOpenMemHandle(&p, handle, cudaIpcMemLazyEnablePeerAccess);
  if (e == cudaSuccess) return static_cast<std::byte*>(p);
  cudaGetLastError();
  why = fmt::format("it does not reach rank {}'s memory: {}", rank, cudaGetErrorString(e));
  return nullptr;
}

}  // namespace

PeerCopies::PeerCopies(Comm& comm, Device device) : comm_(comm), device_(device), wait_flags_(flags_of_waits(device)) {}

std::string PeerCopies::why_not(Comm& comm) {
  std::string own = peer_access_disabled() ? "NCCL_P2P_DISABLE is set" : "";
  for (const Peer& peer : comm.peers())
    if (!peer.here) own = fmt::format("rank {} is on another host, {}", peer.rank, peer.host);
  return first_reason(comm, own, "whether GPUs may copy to each other");
}

void PeerCopies::close() {
  cudaSetDevice(device_.index);
  for (std::byte* memory : std::exchange(opened_, {})) cudaIpcCloseMemHandle(memory);
}

std::unique_ptr<PeerCopies> PeerCopies::open(Comm& comm, Device device, const std::byte* allocation,
                                             std::span<const Tensor> tensors, const Tensor& barrier_counts,
                                             std::string& why) {
  std::byte* const base = const_cast<std::byte*>(allocation);
  std::unique_ptr<PeerCopies> copies(new PeerCopies(comm, device));
  backend::fill(barrier_counts.data, device, 0, barrier_counts.bytes(), comm.stream().handle());
  comm.stream().synchronize();  // the counters are 0 before another rank can write them
  cudaIpcMemHandle_t offer{};
  why = first_reason(comm, why_no_offer(base, offer), "memory for copies");
  if (!why.empty()) return nullptr;
  const std::vector<cudaIpcMemHandle_t> offers = comm.all_gather_host(offer, "memory for copies, offered");
  std::vector<std::byte*> bases;
  std::string failed;
  for (int r = 0; r < comm.world(); ++r) {
    const bool opens = r != comm.rank() && failed.empty();
    bases.push_back(r == comm.rank() ? base
                    : opens          ? open_memory(offers[r], comm.peers()[static_cast<size_t>(r)].rank, failed)
                                     : nullptr);
    if (opens && failed.empty()) copies->opened_.push_back(bases.back());
  }
  why = first_reason(comm, failed, "memory for copies, opened");
  if (!why.empty()) {
    copies->close();
    comm.barrier("memory for copies, given back");  // no rank may free memory that another has mapped
    return nullptr;
  }
  const auto find_on_ranks = [&](const Tensor& t) {
    const std::vector<int64_t> offsets = comm.all_gather_host<int64_t>(t.data - base, "a tensor's offset");
    Shared shared{t, {}};
    for (int r = 0; r < comm.world(); ++r) shared.at.push_back(bases[r] + offsets[r]);
    return shared;
  };
  copies->barrier_counts_ = find_on_ranks(barrier_counts);
  for (const Tensor& t : tensors) copies->shared_.push_back(find_on_ranks(t));
  return copies;
}

const PeerCopies::Shared* PeerCopies::find(const Tensor& x) const {
  for (const Shared& s : shared_)
    if (x.data >= s.mine.data && x.data + x.bytes() <= s.mine.data + s.mine.bytes()) return &s;
  return nullptr;
}

std::byte* PeerCopies::on_rank(int rank, const Tensor& x) const {
  const Shared* shared = find(x);
  TRIAD_CHECK(shared != nullptr, "{} is not shared with the other ranks", x.str());
  return shared->at[rank] + (x.data - shared->mine.data);
}

template <class F>
void PeerCopies::for_each_other(
    F&& f) const {  // starts at rank + 1, so that at any time each rank writes to a different one
  for (int i = 1; i < comm_.world(); ++i) f((comm_.rank() + i) % comm_.world());
}

// A barrier between the ranks' streams: work queued after it runs after the work that every rank queued before its own
// barrier.
void PeerCopies::barrier() {
  void* const stream = comm_.stream().handle();
  const auto count_of = [&](int at, int of) { return barrier_counts_.at[at] + of * sizeof(uint32_t); };
  ++barriers_;
  for_each_other([&](int r) { write_value(stream, count_of(r, comm_.rank()), barriers_); });
  for_each_other([&](int r) { wait_value(stream, count_of(comm_.rank(), r), barriers_, wait_flags_); });
}

void PeerCopies::all_gather(const Tensor& x) {
  const int64_t bytes = x.bytes() / comm_.world(), own = comm_.rank() * bytes;
  barrier();  // no rank uses x's old contents after this barrier
  for_each_other([&](int r) {
    CUDA_CHECK(cudaMemcpyAsync(on_rank(r, x) + own, x.data + own, bytes, cudaMemcpyDeviceToDevice,
                               static_cast<cudaStream_t>(comm_.stream().handle())));
  });
  barrier();
}

void PeerCopies::all_to_all(const Tensor& x, const Tensor& staging) {
  const int64_t bytes = x.bytes() / comm_.world(), own = comm_.rank() * bytes;
  barrier();
  for_each_other([&](int r) {
    CUDA_CHECK(cudaMemcpyAsync(on_rank(r, staging) + own, x.data + r * bytes, bytes, cudaMemcpyDeviceToDevice,
                               static_cast<cudaStream_t>(comm_.stream().handle())));
  });
  barrier();
}

}  // namespace triad
