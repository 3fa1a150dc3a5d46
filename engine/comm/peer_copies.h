// PeerCopies: one host's ranks write to each other's GPU memory with the copy engines, which leave all SMs to
// concurrent kernels. (An NCCL collective occupies few SMs, but for a long time: a concurrent matrix product with one
// CTA per SM then needs two waves, twice its time.) The ranks' streams synchronise by counters: each rank has one for
// every other rank, which writes it.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/comm/comm.h"

namespace triad {

class PeerCopies {
 public:
  // Why copies are impossible for any memory, with the rank concerned: ranks on other hosts, NCCL_P2P_DISABLE.
  // Empty if open() may succeed. Collective; the same answer on all ranks.
  static std::string why_not(Comm&);
  // Opens the other ranks' memory. tensors and barrier_counts [world] i32 must be in the allocation that begins at
  // `base`; shapes and dtypes must be the same on every rank, offsets may differ. Collective. Returns null on all
  // ranks, with the reason in `why`, if a rank cannot access another's memory.
  static std::unique_ptr<PeerCopies> open(Comm&, Device, const std::byte* base, std::span<const Tensor> tensors,
                                          const Tensor& barrier_counts, std::string& why);
  ~PeerCopies() { close(); }
  // Unmaps the other ranks' memory; required before they free it.
  void close();
  PeerCopies(const PeerCopies&) = delete;

  bool holds(const Tensor& x) const { return find(x) != nullptr; }
  // Comm's collectives, on its stream. x and staging must be within shared tensors.
  void all_gather(const Tensor& x);
  void all_to_all(const Tensor& x, const Tensor& staging);

 private:
  // A tensor on this rank and the same tensor on every rank.
  struct Shared {
    Tensor mine;
    std::vector<std::byte*> at;  // [world]: address of each rank's tensor in this process
  };
  PeerCopies(Comm& comm, Device device);
  const Shared* find(const Tensor& x) const;
  std::byte* on_rank(int rank, const Tensor& x) const;
  void barrier();
  template <class F>
  void for_each_other(F&& f) const;

  Comm& comm_;
  Device device_;
  unsigned wait_flags_;
  uint32_t barriers_ = 0;
  std::vector<std::byte*> opened_;  // other ranks' allocations, mapped
  Shared barrier_counts_;           // [world] i32: how many barriers each rank has reached
  std::vector<Shared> shared_;
};

}  // namespace triad
