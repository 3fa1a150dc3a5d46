// PeerCopies: the ranks of one host write to each other's GPU memory by the copy engines, which take no processors from
// the kernels beside them. (A sum by kernels needs few of them but needs them for long: a product of as many CTAs as
// there are processors takes a second wave, twice its time, for one that is taken.) Ranks wait for each other on their
// streams: each has a number for each other rank in memory that this one writes to.
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
  // Why there can be none, whatever the memory: ranks on other hosts, NCCL_P2P_DISABLE; with the rank that says so.
  // Empty: worth trying. All ranks ask, and hear the same.
  static std::string why_not(Comm&);
  // tensors, meetings [world] i32: all in the allocation that begins at base; the same ones on every rank, though
  // elsewhere. All ranks ask. Null, on all of them, where one does not reach another's memory; `why` then says which.
  static std::unique_ptr<PeerCopies> open(Comm&, Device, const std::byte* base, std::span<const Tensor> tensors,
                                          const Tensor& meetings, std::string& why);
  ~PeerCopies() { close(); }
  // Gives the other ranks' memory back; before they free it.
  void close();
  PeerCopies(const PeerCopies&) = delete;

  bool holds(const Tensor& x) const { return find(x) != nullptr; }
  // As the Comm's, on its stream; of tensors that it holds.
  void all_gather(const Tensor& x);
  void all_to_all(const Tensor& x, const Tensor& staging);

 private:
  struct Shared {
    Tensor mine;
    std::vector<std::byte*> at;  // of each rank
  };
  PeerCopies(Comm& comm, Device device);
  const Shared* find(const Tensor& x) const;
  std::byte* on_rank(int rank, const Tensor& x) const;
  void meet();
  template <class F>
  void for_each_other(F&& f) const;

  Comm& comm_;
  Device device_;
  unsigned wait_flags_;
  uint32_t met_ = 0;
  std::vector<std::byte*> opened_;  // allocations of other ranks
  Shared meetings_;                 // [world]: how often each rank has come to meet()
  std::vector<Shared> shared_;
};

}  // namespace triad
