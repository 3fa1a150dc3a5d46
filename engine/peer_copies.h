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

#include "engine/comm.h"

namespace triad {

class PeerCopies {
 public:
  // tensors: all in the allocation that begins at base; the same ones on every rank, though elsewhere. All ranks ask.
  // Null, on all of them, where one does not reach another: on other hosts, by NCCL_P2P_DISABLE, GPUs without a link;
  // `why` then says which, and on what rank.
  static std::unique_ptr<PeerCopies> open(Comm&, Device, const std::byte* base, std::span<const Tensor> tensors,
                                          std::string& why);
  ~PeerCopies();
  // Gives the other ranks' memory back; before they free it.
  void close();
  PeerCopies(const PeerCopies&) = delete;

  bool holds(const Tensor& x) const { return find(x) != nullptr; }
  // As the Comm's, on its stream; of tensors that it holds.
  void all_gather(const Tensor& x);
  void exchange_parts(const Tensor& x, const Tensor& room);

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
  std::byte* flags_;  // [world] u32: how often each rank has come to meet()
  uint32_t met_ = 0;
  std::vector<std::byte*> opened_;  // allocations of other ranks
  std::vector<std::byte*> flags_of_;
  std::vector<Shared> shared_;
};

}  // namespace triad
