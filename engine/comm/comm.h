// Comm: the ranks of a run and their collectives. Every rank calls the same ones in the same order. Those on tensors
// are queued on stream(), in place, and sums have a fixed order of ranks wherever the library behind has one.
#pragma once
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
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

// NCCL with few or all CTAs. few: a sum leaves most SMs to ForkJoin kernels that are sized for the whole GPU.
// all: the fastest sum.
enum class CommCtas { few, all };

// A process of the run, as all know each other.
struct Peer {
  int rank = 0, local_rank = 0, pid = 0;
  std::string host, device, pci;  // pci: where its GPU sits; empty on the CPU
  bool here = false;              // on this host, among the processes that this one sees
};

class Comm {
 public:
  // link: absent in a world of one.
  Comm(const LaunchEnv&, Device, std::unique_ptr<Link>, double timeout_s);
  // The first of `world` ranks that are not there: see make_planned_comm.
  Comm(int world, Device);
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;

  int rank() const { return rank_; }
  int world() const { return world_; }
  bool first() const { return rank_ == 0; }
  virtual std::string name() const = 0;
  Stream& stream() { return stream_; }  // of collectives on tensors
  const std::vector<Peer>& peers() const { return peers_; }
  // Milliseconds that the host has waited in collectives since the last call of this.
  double take_waited_ms() { return std::exchange(waited_ms_, 0.0); }
  int64_t collectives() const { return guard_ ? guard_->count() : 0; }
  // Where the last 1,000 of them are written when one does not finish in time, or a rank is gone.
  void record_collectives(const std::string& path) {
    if (guard_) guard_->record_to(path);
  }
  CommGuard::Last last_collective() const { return guard_ ? guard_->last() : CommGuard::Last{}; }

  // x [n], contiguous, f32, f64 or bf16 (added in f32, rounded once or at each rank): the sum over the ranks.
  // what: of what, for messages ("bucket 3").
  void all_reduce(Tensor x, const std::string& what, CommCtas = CommCtas::all);
  // x [world * n]: part `rank` becomes the sum of the ranks' parts `rank`; the others hold nothing defined after it.
  void reduce_scatter(Tensor x, const std::string& what, CommCtas = CommCtas::all);
  // x [world * n]: part r becomes what rank r has there.
  void all_gather(Tensor x, const std::string& what);

  // x, staging [world * n]: part r of staging becomes what rank r has as part `rank` of x. The own part is left as it
  // is.
  void all_to_all(Tensor x, Tensor staging, const std::string& what);
  // Offers tensors, in the allocation that begins at base, to the other ranks, all of which do the same. Where they
  // reach each other's memory all_gather and all_to_all of these take no processors of a GPU, and shares() tells.
  // meetings [world] i32, in the same allocation: the Comm's from then on. may_share(): on a GPU it is worth asking;
  // the same on all ranks, and known before there is memory to share.
  virtual void share(const std::byte*, std::span<const Tensor>, const Tensor& /*meetings*/) {}
  virtual bool shares() const { return false; }
  virtual bool may_share() const { return false; }
  // Why not, though this Comm does where it can; nothing otherwise.
  virtual std::string why_not_shared() const { return ""; }

  // On the host, at once: every rank's value, in the order of ranks.
  template <class T>
  std::vector<T> all_gather_host(const T& mine, const std::string& what) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(world_), mine);
    all_gather_host_bytes(&mine, all.data(), sizeof(T), what);
    return all;
  }
  std::vector<std::string> all_gather_host_text(const std::string& mine, const std::string& what);
  void barrier(const std::string& what) { all_gather_host(char{0}, what); }
  // Sums of values that at most one rank has set (0 elsewhere): the same bits on every rank.
  void add(std::span<double> values, const std::string& what);

  // The orderly end of a run, which all ranks reach.
  void finish();
  // The other end, after an error: tells it, does the last work, which throws nothing, and exits with the code. To
  // unwind would free memory, for which CUDA waits for collectives that never end, and end threads that a disk may hold
  // up.
  [[noreturn]] void abandon(const std::string& why, int exit_code, const std::function<void()>& last_work);
  // The same where all ranks have met the same error: none exits before all have done their last work.
  [[noreturn]] void fail_together(const std::string& why, const std::function<void()>& last_work);

 protected:
  virtual void do_all_reduce(Tensor, CommCtas) {}
  virtual void do_reduce_scatter(Tensor, CommCtas) {}
  virtual void do_all_gather(Tensor) {}
  virtual void do_all_to_all(Tensor, Tensor) {}
  virtual void do_finish() {}
  // On the CPU, and where the host does the work, a collective is finished when its call returns.
  virtual bool on_stream() const { return false; }
  Link& link() const { return *link_; }
  CommGuard& guard() { return *guard_; }

 private:
  // From here on the end of other ranks is no surprise: all are here.
  void expect_end();
  template <class Call>
  void guarded(const char* kind, const std::string& what, int64_t bytes, bool on_stream, Call&& call);
  void all_gather_host_bytes(const void* mine, void* all, int64_t bytes, const std::string& what);
  void meet(const LaunchEnv&, Device);

  int rank_, world_;
  std::unique_ptr<Link> link_;
  std::unique_ptr<CommGuard> guard_;
  Stream stream_;
  std::vector<Peer> peers_;
  double waited_ms_ = 0;
};

// The GPU of this rank: that of its local rank, or the only one it sees. Throws if the host has more ranks than GPUs.
Device device_of(const LaunchEnv&);

// The ranks of this process's run. automatic: NCCL on a GPU, MPI on the CPU, and there, started without MPI, TCP.
std::unique_ptr<Comm> open_comm(const LaunchEnv&, Device, CommBackend, double timeout_s);

// A world of one: every collective is done before it begins.
std::unique_ptr<Comm> make_self_comm(Device);
// Sums on the host, in the order of ranks: bits depend on the ranks alone, not on the size of what is summed. Tensors
// of a GPU go through pinned memory, and the host waits for them.
std::unique_ptr<Comm> make_host_comm(const LaunchEnv&, Device, std::unique_ptr<Link>, double timeout_s);
// NCCL, loaded when it is asked for. The link passes its id and the run's control.
std::unique_ptr<Comm> make_nccl_comm(const LaunchEnv&, Device, std::unique_ptr<Link>, double timeout_s);
std::string why_no_nccl();  // empty: it can be loaded

// For plans: a rank of `world`, as far as memory goes. There is nobody else, and a collective does nothing.
std::unique_ptr<Comm> make_planned_comm(int world);

}  // namespace triad
