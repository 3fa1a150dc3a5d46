// Comm over NCCL. NCCL is loaded at run time (libnccl.so.2, in PyTorch's and NVIDIA's packages), so a program built
// with its header also runs on machines without it. Collectives are queued on the comm stream; the host does not wait
// for them.
#include <dlfcn.h>
#include <nccl.h>

#include "engine/check.h"
#include "engine/comm/comm.h"
#include "engine/comm/peer_copies.h"
#include "engine/cuda_check.h"

namespace triad {

namespace {

struct Nccl {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRank) comm_init_rank;
  decltype(&ncclCommSplit) comm_split;
  decltype(&ncclCommDestroy) comm_destroy;
  decltype(&ncclCommGetAsyncError) comm_get_async_error;
  decltype(&ncclGetErrorString) get_error_string;
  decltype(&ncclGetLastError) get_last_error;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) receive;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  std::string error;
};

Nccl load() {
  Nccl nccl{};
  void* handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    nccl.error = fmt::format(
        "{} (it comes with NVIDIA's package libnccl2 or the Python wheel nvidia-nccl-cu13; its "
        "folder may have to be in LD_LIBRARY_PATH)",
        dlerror());
    return nccl;
  }
  const auto find = [&]<class F>(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    if (function == nullptr && nccl.error.empty()) nccl.error = fmt::format("libnccl.so.2 has no {}", name);
  };
  find(nccl.get_version, "ncclGetVersion");
  find(nccl.get_unique_id, "ncclGetUniqueId");
  find(nccl.comm_init_rank, "ncclCommInitRank");
  find(nccl.comm_split, "ncclCommSplit");
  find(nccl.comm_destroy, "ncclCommDestroy");
  find(nccl.comm_get_async_error, "ncclCommGetAsyncError");
  find(nccl.get_error_string, "ncclGetErrorString");
  find(nccl.get_last_error, "ncclGetLastError");
  find(nccl.all_reduce, "ncclAllReduce");
  find(nccl.reduce_scatter, "ncclReduceScatter");
  find(nccl.all_gather, "ncclAllGather");
  find(nccl.send, "ncclSend");
  find(nccl.receive, "ncclRecv");
  find(nccl.group_start, "ncclGroupStart");
  find(nccl.group_end, "ncclGroupEnd");
  return nccl;
}

const Nccl& nccl() {
  static const Nccl loaded = load();
  return loaded;
}

void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess && result != ncclInProgress)
    fail("{}: {} ({})", call, nccl().get_error_string(result), nccl().get_last_error(nullptr));
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return ncclFloat64;
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    default:
      fail("a sum over ranks of {}: floats have one", name_of(dtype));
  }
}

class NcclComm final : public Comm {
 public:
  NcclComm(const LaunchEnv& env, Device device, std::unique_ptr<Link> link, double timeout_s)
      : Comm(env, device, std::move(link), timeout_s) {
    int version = 0;
    check(nccl().get_version(&version), "ncclGetVersion");
    name_ = fmt::format("NCCL {}.{}.{}, connected over {}", version / 10000, version / 100 % 100, version % 100,
                        Comm::link().name());
    ncclUniqueId id{};
    if (rank() == 0) check(nccl().get_unique_id(&id), "ncclGetUniqueId");
    id = all_gather_host(id, "NCCL's id").front();
    no_copies_ = PeerCopies::why_not(*this);
    guard().begin("the start of NCCL", 0);
    CUDA_CHECK(cudaSetDevice(device.index));
    check(nccl().comm_init_rank(&all_ctas_, world(), id, rank()), "ncclCommInitRank");
    start();
  }
  NcclComm(NcclComm& all, const std::vector<int>& ranks)
      : Comm(all, ranks, all.Comm::link().group(ranks)), name_(all.name_), no_copies_(PeerCopies::why_not(*this)) {
    guard().begin(fmt::format("the start of NCCL for a group of {} ranks", world()), 0);
    check(nccl().comm_split(all.all_ctas_, /*color=*/ranks.front(), rank(), &all_ctas_, /*config=*/nullptr),
          "ncclCommSplit");
    start();
  }
  ~NcclComm() override { guard().expect_end(); }  // the guard must not query a destroyed communicator
  std::string name() const override { return name_; }
  void share(const std::byte* base, std::span<const Tensor> tensors, const Tensor& barrier_counts) override {
    if (may_share()) copies_ = PeerCopies::open(*this, stream().device(), base, tensors, barrier_counts, no_copies_);
  }
  bool shares() const override { return copies_ != nullptr; }
  bool may_share() const override { return no_copies_.empty(); }
  std::string why_not_shared() const override { return no_copies_; }
  bool can_record() const override { return true; }

 protected:
  std::unique_ptr<Comm> make_group(const std::vector<int>& ranks) override {
    return std::make_unique<NcclComm>(*this, ranks);
  }
  bool on_stream() const override { return true; }
  void do_all_reduce(Tensor x, CommCtas ctas) override {
    check(nccl().all_reduce(x.data, x.data, static_cast<size_t>(x.numel()), type_of(x.dtype), ncclSum, comm(ctas),
                            queue()),
          "ncclAllReduce");
  }
  void do_reduce_scatter(Tensor x, CommCtas ctas) override {
    const int64_t n = x.numel() / world();
    std::byte* const mine = x.data + rank() * n * size_of(x.dtype);
    check(nccl().reduce_scatter(x.data, mine, static_cast<size_t>(n), type_of(x.dtype), ncclSum, comm(ctas), queue()),
          "ncclReduceScatter");
  }
  void do_all_to_all(Tensor x, Tensor staging) override {
    if (copies_ && copies_->holds(x)) return copies_->all_to_all(x, staging);
    const int64_t n = x.numel() / world(), bytes = n * size_of(x.dtype);
    check(nccl().group_start(), "ncclGroupStart");
    for (int r = 0; r < world(); ++r) {
      if (r == rank()) continue;
      const auto count = static_cast<size_t>(n);
      check(nccl().send(x.data + r * bytes, count, type_of(x.dtype), r, all_ctas_, queue()), "ncclSend");
      check(nccl().receive(staging.data + r * bytes, count, type_of(x.dtype), r, all_ctas_, queue()), "ncclRecv");
    }
    check(nccl().group_end(), "ncclGroupEnd");
  }
  void do_exchange(std::span<const ConstPiece> to, std::span<const Piece> from, int64_t) override {
    if (to.empty() && from.empty()) return;
    check(nccl().group_start(), "ncclGroupStart");
    for (const ConstPiece& p : to)
      check(nccl().send(p.data.data, static_cast<size_t>(p.data.bytes()), ncclUint8, p.rank, all_ctas_, queue()),
            "ncclSend");
    for (const Piece& p : from)
      check(nccl().receive(p.data.data, static_cast<size_t>(p.data.bytes()), ncclUint8, p.rank, all_ctas_, queue()),
            "ncclRecv");
    check(nccl().group_end(), "ncclGroupEnd");
  }
  void do_all_gather(Tensor x) override {
    if (copies_ && copies_->holds(x)) return copies_->all_gather(x);
    const int64_t n = x.numel() / world();
    const std::byte* const mine = x.data + rank() * n * size_of(x.dtype);
    check(nccl().all_gather(mine, x.data, static_cast<size_t>(n), type_of(x.dtype), all_ctas_, queue()),
          "ncclAllGather");
  }
  void do_finish() override {
    if (copies_) copies_->close();
    barrier("memory for copies, closed");
    copies_.reset();
    guard().begin("the end of NCCL", 0);
    for (ncclComm_t comm : {few_ctas_, all_ctas_}) check(nccl().comm_destroy(comm), "ncclCommDestroy");
    guard().end();
  }

 private:
  // CTAs for a sum during backward. With NCCL's default, 24, a concurrent matrix product with 128 CTAs no longer fits
  // onto the SMs in one wave: it needs two, twice its time. 4 CTAs leave room for it.
  static constexpr int kFewCtas = 4;
  // Splits few_ctas_ from all_ctas_, which completes NCCL's start, and has the guard watch both.
  void start() {
    ncclConfig_t few = NCCL_CONFIG_INITIALIZER;
    few.minCTAs = few.maxCTAs = kFewCtas;
    check(nccl().comm_split(all_ctas_, /*color=*/0, rank(), &few_ctas_, &few), "ncclCommSplit");
    guard().end();
    guard().add_health_check([this]() -> std::string {
      for (ncclComm_t comm : {all_ctas_, few_ctas_}) {
        ncclResult_t state = ncclSuccess;
        if (nccl().comm_get_async_error(comm, &state) != ncclSuccess) return "NCCL does not answer";
        if (state != ncclSuccess && state != ncclInProgress)
          return fmt::format("NCCL: {} ({})", nccl().get_error_string(state), nccl().get_last_error(comm));
      }
      return "";
    });
  }
  ncclComm_t comm(CommCtas ctas) const { return ctas == CommCtas::few ? few_ctas_ : all_ctas_; }
  cudaStream_t queue() { return static_cast<cudaStream_t>(stream().handle()); }

  std::string name_;
  std::string no_copies_;  // why PeerCopies is not possible; empty if it is
  std::unique_ptr<PeerCopies> copies_;
  ncclComm_t all_ctas_ = nullptr, few_ctas_ = nullptr;  // not destroyed after an error, since destroying is collective
};

}  // namespace

std::string why_no_nccl() { return nccl().error; }

std::unique_ptr<Comm> make_nccl_comm(const LaunchEnv& env, Device device, std::unique_ptr<Link> link,
                                     double timeout_s) {
  return std::make_unique<NcclComm>(env, device, std::move(link), timeout_s);
}

}  // namespace triad
