#include "engine/peer_copies.h"

#include <cuda.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/cuda_check.h"
#include "engine/launch_env.h"

namespace triad {

namespace {

using StreamValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

// Of the driver, which nothing here links.
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
void wait_value(void* stream, std::byte* at, uint32_t value) {
  static const StreamValue wait = find("cuStreamWaitValue32");
  check(wait(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(at), value, CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32");
}

// What a rank tells the others of its memory.
struct Offer {
  cudaIpcMemHandle_t memory, flags;
};

// The reason of the first rank that has one, on all ranks.
std::string first_reason(Comm& comm, const std::string& own, const char* what) {
  const std::vector<std::string> all = comm.exchange_text(own, what);
  for (size_t r = 0; r < all.size(); ++r)
    if (!all[r].empty()) return fmt::format("rank {}: {}", r, all[r]);
  return "";
}

// "" where this rank can offer its memory.
std::string why_no_offer(const Comm& comm, std::byte* base, std::byte* flags, Offer& offer) {
  for (const Peer& peer : comm.peers())
    if (!peer.here) return fmt::format("rank {} is on another host, {}", peer.rank, peer.host);
  if (peer_access_disabled()) return "NCCL_P2P_DISABLE is set";
  for (auto [handle, memory] : {std::pair(&offer.memory, base), std::pair(&offer.flags, flags)})
    if (const cudaError_t e = cudaIpcGetMemHandle(handle, memory); e != cudaSuccess) {
      cudaGetLastError();  // no error of the run's: its sums go another way
      return fmt::format("its memory cannot be shared: {}", cudaGetErrorString(e));
    }
  return "";
}

// Null, and why.
std::byte* open_memory(const cudaIpcMemHandle_t& handle, int rank, std::string& why) {
  void* p = nullptr;
  const cudaError_t e = cudaIpcOpenMemHandle(&p, handle, cudaIpcMemLazyEnablePeerAccess);
  if (e == cudaSuccess) return static_cast<std::byte*>(p);
  cudaGetLastError();
  why = fmt::format("it does not reach rank {}'s memory: {}", rank, cudaGetErrorString(e));
  return nullptr;
}

}  // namespace

PeerCopies::PeerCopies(Comm& comm, Device device) : comm_(comm), device_(device) {
  constexpr int64_t kBytes = 2 << 20;  // an allocation that is not a part of another, which a handle would stand for
  flags_ = backend::allocate(device, kBytes);
  backend::fill(flags_, device, 0, kBytes, comm.stream().handle());
  comm.stream().synchronize();
}

PeerCopies::~PeerCopies() {
  close();
  backend::deallocate(device_, flags_);
}

void PeerCopies::close() {
  cudaSetDevice(device_.index);
  for (std::byte* memory : std::exchange(opened_, {})) cudaIpcCloseMemHandle(memory);
}

std::unique_ptr<PeerCopies> PeerCopies::open(Comm& comm, Device device, const std::byte* allocation,
                                             std::span<const Tensor> tensors, std::string& why) {
  std::byte* const base = const_cast<std::byte*>(allocation);
  std::unique_ptr<PeerCopies> copies(new PeerCopies(comm, device));
  Offer offer{};
  why = first_reason(comm, why_no_offer(comm, base, copies->flags_, offer), "memory for copies");
  if (!why.empty()) return nullptr;
  const std::vector<Offer> offers = comm.exchange(offer, "memory for copies, offered");
  std::vector<std::byte*> bases;
  std::string failed;
  for (int r = 0; r < comm.world() && failed.empty(); ++r) {
    if (r == comm.rank()) {
      bases.push_back(base);
      copies->flags_of_.push_back(copies->flags_);
      continue;
    }
    for (auto [handle, to] : {std::pair(&offers[r].memory, &bases), std::pair(&offers[r].flags, &copies->flags_of_)}) {
      to->push_back(failed.empty() ? open_memory(*handle, r, failed) : nullptr);
      if (failed.empty()) copies->opened_.push_back(to->back());
    }
  }
  why = first_reason(comm, failed, "memory for copies, opened");
  if (!why.empty()) {
    copies->close();
    comm.barrier("memory for copies, given back");  // none is freed that another still has
    return nullptr;
  }
  for (const Tensor& t : tensors) {
    const std::vector<int64_t> offsets = comm.exchange<int64_t>(t.data - base, "a tensor's place");
    Shared shared{t, {}};
    for (int r = 0; r < comm.world(); ++r) shared.at.push_back(bases[r] + offsets[r]);
    copies->shared_.push_back(std::move(shared));
  }
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
void PeerCopies::for_each_other(F&& f) const {  // each begins with another one
  for (int i = 1; i < comm_.world(); ++i) f((comm_.rank() + i) % comm_.world());
}

// Whatever comes on the stream after it comes after what every other rank's stream had before its own.
void PeerCopies::meet() {
  void* const stream = comm_.stream().handle();
  const auto flag = [](std::byte* flags, int rank) { return flags + rank * sizeof(uint32_t); };
  ++met_;
  for_each_other([&](int r) { write_value(stream, flag(flags_of_[r], comm_.rank()), met_); });
  for_each_other([&](int r) { wait_value(stream, flag(flags_, r), met_); });
}

void PeerCopies::all_gather(const Tensor& x) {
  const int64_t bytes = x.bytes() / comm_.world(), own = comm_.rank() * bytes;
  meet();  // the others are done with what they have there
  for_each_other([&](int r) {
    CUDA_CHECK(cudaMemcpyAsync(on_rank(r, x) + own, x.data + own, bytes, cudaMemcpyDeviceToDevice,
                               static_cast<cudaStream_t>(comm_.stream().handle())));
  });
  meet();
}

void PeerCopies::exchange_parts(const Tensor& x, const Tensor& room) {
  const int64_t bytes = x.bytes() / comm_.world(), own = comm_.rank() * bytes;
  meet();
  for_each_other([&](int r) {
    CUDA_CHECK(cudaMemcpyAsync(on_rank(r, room) + own, x.data + r * bytes, bytes, cudaMemcpyDeviceToDevice,
                               static_cast<cudaStream_t>(comm_.stream().handle())));
  });
  meet();
}

}  // namespace triad
