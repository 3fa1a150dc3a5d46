// Comm: a run's ranks and their collectives. Every rank must call the same collectives in the same order. Collectives
// on tensors work in place and are queued on stream(). Sums add in a fixed rank order, except where NCCL chooses the
// order.
#pragma once
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/comm/comm_guard.h"
#include "engine/comm/launch_env.h"
#include "engine/comm/link.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace triad {

enum class CommBackend { automatic, nccl, mpi };

// How many CTAs, and so SMs, NCCL may use for a sum. few: most SMs stay free for concurrent kernels. all: NCCL's own
// choice, the fastest sum.
enum class CommCtas { few, all };

// A process in the run, with the values that every rank sees.
struct Peer {
  int rank = 0, local_rank = 0, pid = 0;
  std::string host, device, pci;  // pci: the GPU's bus address; empty on the CPU
  bool here = false;              // whether it is on this host and in this pid name space
};

class Comm {
 public:
  // link: null if world is 1. timeout_s: dist.timeout_s.
  Comm(const LaunchEnv&, Device, std::unique_ptr<Link>, double timeout_s);
  // A rank without peers, for make_self_comm() and make_planned_comm().
  Comm(int world, Device);
  // A group within `all` (group()). ranks: the group's, ascending.
  Comm(Comm& all, const std::vector<int>& ranks, std::unique_ptr<Link>);
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;

  int rank() const { return rank_; }
  int world() const { return world_; }
  bool first() const { return rank_ == 0; }
  virtual std::string name() const = 0;
  Stream& stream() { return *stream_; }  // collectives on tensors are queued here
  const std::vector<Peer>& peers() const { return peers_; }
  // Whether the ranks are on more than one host.
  bool has_several_hosts() const;
  // A rank's name in messages: "rank 3", or with several hosts "rank 3 (host b)".
  std::string rank_name(int rank) const;
  // Milliseconds that the host has waited in collectives since the previous call.
  double take_waited_ms() { return std::exchange(waited_ms_, 0.0); }

  // A Comm of `count` ranks: this one and those that differ from it by multiples of `stride`, such that all ranks'
  // groups divide the world: among 8 ranks, group(2) has ranks 2 and 3, group(4, 2) ranks 1, 3, 5 and 7. count * stride
  // divides world(). rank() and world() count within the group, peers() are named as in the world. It queues on the
  // same stream() and belongs to this Comm. Collective, and so are the group's own collectives: all groups call the
  // same ones at the same time. group(world()) is this Comm itself. Queue::own: a group with a stream() of its own,
  // which works beside this Comm's; what the two queue still begins in the order of the calls.
  enum class Queue { same, own };
  Comm& group(int count, int stride = 1, Queue queue = Queue::same);
  int64_t collectives() const { return guard_ ? guard_->count() : 0; }
  // Sets the file that receives the last 1,000 collectives when one times out or a rank is gone.
  void record_collectives(const std::string& path) {
    if (guard_) guard_->record_to(path);
  }
  // Adds text to the message with which the guard ends the process: what advice() returns, unless that takes too long.
  void advise_at_end(std::function<std::string()> advice) {
    if (guard_) guard_->advise(std::move(advice));
  }
  CommGuard::Last last_collective() const { return guard_ ? guard_->last() : CommGuard::Last{}; }

  // Replaces x [n] by its sum over the ranks. x: contiguous, f32, f64 or bf16; bf16 is added in f32 and rounded at the
  // end or, by NCCL, at each rank. what: names the data in messages, "bucket 3".
  void all_reduce(Tensor x, const std::string& what, CommCtas = CommCtas::all);
  // x [world * n]: part `rank` becomes the sum of all ranks' parts `rank`; the other parts are undefined afterwards.
  void reduce_scatter(Tensor x, const std::string& what, CommCtas = CommCtas::all);
  // x [world * n]: part r becomes part r of rank r's x.
  void all_gather(Tensor x, const std::string& what);

  // Exchanges parts: part r of staging becomes part `rank` of rank r's x, with x and staging [world * n]. This rank's
  // own part is not written.
  void all_to_all(Tensor x, Tensor staging, const std::string& what);
  // A contiguous tensor from or for one other rank.
  template <class TensorType>
  struct PieceOf {
    int rank = 0;
    TensorType data;
  };
  using Piece = PieceOf<Tensor>;
  using ConstPiece = PieceOf<ConstTensor>;
  // Sends `to` to other ranks and overwrites `from` with what they send. A rank receives another's pieces in the order
  // in which that one lists them, and the two agree on each piece's bytes. All ranks must call it, also with nothing to
  // exchange, and agree on most_bytes, the most bytes that any rank sends to another.
  void exchange(std::span<const ConstPiece> to, std::span<const Piece> from, int64_t most_bytes,
                const std::string& what);
  // Exchanges within a CUDA graph (engine/graph.h), if can_record(). record() calls work(), which records the graph and
  // may call exchange(), but no other collective. launch_recorded() calls launch(), which queues the graph on the
  // stream `on`. All exchanges in the graph count as one collective, named `what` in messages; it ends with the graph.
  void record(const std::function<void()>& work);
  void launch_recorded(const std::string& what, const Stream& on, const std::function<void()>& launch);
  virtual bool can_record() const { return false; }
  // Makes tensors accessible to the other ranks, so that copy engines can move their data. All ranks must call it with
  // the same tensors, all in the allocation that begins at `base`. If the ranks can access each other's memory,
  // shares() is then true, and all_gather and all_to_all on these tensors use no SMs. barrier_counts [world] i32, in
  // the same allocation, is used by the Comm from then on. may_share(): whether share() can succeed as far as this is
  // known before memory is allocated; the same on all ranks.
  virtual void share(const std::byte*, std::span<const Tensor>, const Tensor& /*barrier_counts*/) {}
  virtual bool shares() const { return false; }
  virtual bool may_share() const { return false; }
  // Why may_share() or shares() is false; empty if sharing was not tried or works.
  virtual std::string why_not_shared() const { return ""; }

  // Gathers one value from each rank on the host and blocks until it has all. Returns them in rank order. T is
  // trivially copyable.
  template <class T>
  std::vector<T> all_gather_host(const T& mine, const std::string& what) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(world_), mine);
    all_gather_host_bytes(&mine, all.data(), sizeof(T), what);
    return all;
  }
  std::vector<std::string> all_gather_host_text(const std::string& mine, const std::string& what);
  void barrier(const std::string& what) { all_gather_host(char{0}, what); }
  // Sums values over the ranks, on the host. Values are added in rank order, so the sum has the same bits on every
  // rank.
  void add(std::span<double> values, const std::string& what);

  // Ends a successful run; collective.
  void finish();
  // Ends the process after an error: logs `why`, calls last_work(), which must not throw, and exits with exit_code. It
  // does not unwind: unwinding would free memory, for which CUDA waits for collectives that never end, and would join
  // threads that a slow disk may block.
  [[noreturn]] void abandon(const std::string& why, int exit_code, const std::function<void()>& last_work);
  // As abandon(), for an error that all ranks have: no rank exits before every rank has called its last_work().
  [[noreturn]] void fail_together(const std::string& why, int exit_code, const std::function<void()>& last_work);

 protected:
  virtual void do_all_reduce(Tensor, CommCtas) = 0;
  virtual void do_reduce_scatter(Tensor, CommCtas) = 0;
  virtual void do_all_gather(Tensor) = 0;
  virtual void do_all_to_all(Tensor, Tensor) = 0;
  virtual void do_exchange(std::span<const ConstPiece>, std::span<const Piece>, int64_t most_bytes) = 0;
  virtual void do_finish() = 0;
  virtual std::unique_ptr<Comm> make_group(const std::vector<int>& ranks);
  // False if a collective is finished when its call returns, as on the CPU and for sums on the host.
  virtual bool on_stream() const { return false; }
  const Stream* stream_of_collectives() const { return on_stream() ? stream_.get() : nullptr; }
  Link& link() const { return *link_; }
  CommGuard& guard() { return *guard_; }

 private:
  // From here on it is no error if another rank's process ends; collective.
  void expect_end();
  template <class Call>
  void guarded(const char* kind, const std::string& what, int64_t bytes, const Stream* on, Call&& call);
  void all_gather_host_bytes(const void* mine, void* all, int64_t bytes, const std::string& what);
  void gather_peers(const LaunchEnv&, Device);

  int rank_, world_;
  std::unique_ptr<Link> link_;
  std::shared_ptr<CommGuard> guard_;
  std::shared_ptr<Stream> stream_;
  std::vector<Peer> peers_;
  double waited_ms_ = 0;
  bool recording_ = false;
  Comm* const all_ = nullptr;  // the Comm to which this group belongs; null: no group
  std::map<std::tuple<int, int, Queue>, std::unique_ptr<Comm>> groups_;  // key: count, stride and queue
};

// This rank's GPU: the one with its local rank, or the only visible one. Throws if the host has more ranks than GPUs.
Device device_of(const LaunchEnv&);

// Connects the ranks in this process's run. automatic: NCCL on a GPU; on the CPU MPI, or TCP if the launcher does not
// start MPI.
std::unique_ptr<Comm> open_comm(const LaunchEnv&, Device, CommBackend, double timeout_s);

// A world with one rank: collectives do nothing.
std::unique_ptr<Comm> make_self_comm(Device);
// Collectives in host memory. A sum adds in rank order, so its bits do not depend on the element count. A GPU's tensors
// are copied through pinned memory, and the host waits for the copies.
std::unique_ptr<Comm> make_host_comm(const LaunchEnv&, Device, std::unique_ptr<Link>, double timeout_s);
// NCCL, loaded on the first call. The link carries NCCL's id and the run's control messages.
std::unique_ptr<Comm> make_nccl_comm(const LaunchEnv&, Device, std::unique_ptr<Link>, double timeout_s);
std::string why_no_nccl();  // empty if NCCL can be loaded

// For plans: a rank of `world` that only accounts for memory; collectives do nothing.
std::unique_ptr<Comm> make_planned_comm(int world);

}  // namespace triad
