// Collectives on the host over a Link. A sum works on one piece of the tensor at a time: each rank receives all ranks'
// values for its own part of the piece, adds them in rank order, and sends the sums to all ranks. It moves 2 (world -
// 1) / world times the bytes each way, as a ring does, and an element's sum does not depend on the piece that contains
// it.
#include <algorithm>
#include <utility>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/dtype_dispatch.h"
#include "engine/memory.h"

namespace triad {

namespace {

// Bytes in one rank's part of a piece: fewer for many ranks, because each rank keeps two pieces.
int64_t part_bytes(int64_t world) {
  constexpr int64_t kMostPart = int64_t{1} << 20, kMostPiece = int64_t{1} << 24, kLeastPart = int64_t{1} << 12;
  return std::clamp(kMostPiece / world / kLeastPart * kLeastPart, kLeastPart, kMostPart);
}

class HostComm final : public Comm {
 public:
  HostComm(const LaunchEnv& env, Device device, std::unique_ptr<Link> link, double timeout_s)
      : Comm(env, device, std::move(link), timeout_s),
        part_bytes_(part_bytes(world())),
        piece_(device, part_bytes_ * world()),
        others_(device, part_bytes_ * world()) {}
  HostComm(HostComm& all, const std::vector<int>& ranks)
      : Comm(all, ranks, all.link().group(ranks)),
        part_bytes_(part_bytes(world())),
        piece_(all.stream().device(), part_bytes_ * world()),
        others_(all.stream().device(), part_bytes_ * world()) {}

  std::string name() const override { return "host memory over " + link().name(); }
  // On the CPU no memory needs to be opened for others. shares() is true there, so that runs on the CPU use the same
  // code path as GPUs that share memory.
  void share(const std::byte*, std::span<const Tensor>, const Tensor&) override {
    shares_ = !stream().device().is_cuda();
  }
  bool shares() const override { return shares_; }

 protected:
  std::unique_ptr<Comm> make_group(const std::vector<int>& ranks) override {
    return std::make_unique<HostComm>(*this, ranks);
  }

  void do_all_reduce(Tensor x, CommCtas) override {
    const int64_t element = size_of(x.dtype), most = part_bytes_ / element * world(), n = x.numel();
    for (int64_t begin = 0; begin < n; begin += most) {
      const int64_t count = std::min(most, n - begin), part = (count + world() - 1) / world();
      load(x, begin, count, 0);
      std::memset(piece_.data() + count * element, 0, static_cast<size_t>((part * world() - count) * element));
      add_parts(x.dtype, part);
      link().all_gather(others_.data(), piece_.data(), part * element);
      store(x, begin, count, piece_.data());
    }
  }

  void do_reduce_scatter(Tensor x, CommCtas) override {
    const int64_t element = size_of(x.dtype), most = part_bytes_ / element, n = x.numel() / world();
    for (int64_t begin = 0; begin < n; begin += most) {
      const int64_t part = std::min(most, n - begin);
      for (int64_t r = 0; r < world(); ++r) load(x, r * n + begin, part, r * part);
      add_parts(x.dtype, part);
      store(x, rank() * n + begin, part, others_.data());
    }
  }

  void do_all_to_all(Tensor x, Tensor staging) override {
    const int64_t element = size_of(x.dtype), most = part_bytes_ / element, n = x.numel() / world();
    for (int64_t begin = 0; begin < n; begin += most) {
      const int64_t part = std::min(most, n - begin);
      for (int64_t r = 0; r < world(); ++r) load(x, r * n + begin, part, r * part);
      link().all_to_all(piece_.data(), others_.data(), part * element);
      for (int64_t r = 0; r < world(); ++r)
        if (r != rank()) store(staging, r * n + begin, part, others_.data() + r * part * element);
    }
  }

  // The link exchanges equal parts between all ranks. One rank's bytes are its pieces, one after the other; where there
  // are fewer, bytes are sent that the receiver ignores.
  void do_exchange(std::span<const ConstPiece> to, std::span<const Piece> from, int64_t most_bytes) override {
    for (int64_t begin = 0; begin < most_bytes; begin += part_bytes_) {
      const int64_t part = std::min(part_bytes_, most_bytes - begin);
      // Calls copy(host, piece data, bytes) for what this part has of each piece.
      const auto for_each = [&](auto pieces, PinnedMemory& memory, auto&& copy) {
        std::vector<int64_t> next(static_cast<size_t>(world()));
        for (const auto& p : pieces) {
          int64_t& end = next[static_cast<size_t>(p.rank)];
          const int64_t at = std::exchange(end, end + p.data.bytes());
          const int64_t first = std::max(at, begin), last = std::min(end, begin + part);
          if (first < last) copy(memory.data() + p.rank * part + first - begin, p.data.data + first - at, last - first);
        }
        stream().synchronize();
      };
      const Device here = stream().device(), cpu = Device::cpu();
      for_each(to, piece_, [&](std::byte* host, const std::byte* data, int64_t bytes) {
        backend::copy(host, cpu, data, here, bytes, stream().handle());
      });
      link().all_to_all(piece_.data(), others_.data(), part);
      for_each(from, others_, [&](const std::byte* host, std::byte* data, int64_t bytes) {
        backend::copy(data, here, host, cpu, bytes, stream().handle());
      });
    }
  }

  void do_finish() override {}  // Comm::finish() ends the link
  void do_all_gather(Tensor x) override {
    const int64_t element = size_of(x.dtype), most = part_bytes_ / element, n = x.numel() / world();
    for (int64_t begin = 0; begin < n; begin += most) {
      const int64_t part = std::min(most, n - begin);
      load(x, rank() * n + begin, part, 0);
      link().all_gather(piece_.data(), others_.data(), part * element);
      for (int64_t r = 0; r < world(); ++r) store(x, r * n + begin, part, others_.data() + r * part * element);
    }
  }

 private:
  // Sums this rank's part of piece_ [world, part] over the ranks, in their order, into others_ [part].
  void add_parts(DType dtype, int64_t part) {
    link().all_to_all(piece_.data(), others_.data(), part * size_of(dtype));
    dispatch_float(dtype, [&]<class T>() {
      T* const all = reinterpret_cast<T*>(others_.data());
      for (int64_t i = 0; i < part; ++i) {
        acc_t<T> sum = all[i];
        for (int64_t r = 1; r < world(); ++r) sum += static_cast<acc_t<T>>(all[r * part + i]);
        all[i] = T(sum);
      }
    });
  }

  // load() copies the elements [begin, begin + count) of x to the elements [at, at + count) of piece_; store() copies
  // them from `from` to x. Both wait for the copy.
  void load(const Tensor& x, int64_t begin, int64_t count, int64_t at) {
    const int64_t element = size_of(x.dtype);
    backend::copy(piece_.data() + at * element, Device::cpu(), x.data + begin * element, x.device, count * element,
                  stream().handle());
    stream().synchronize();
  }
  void store(const Tensor& x, int64_t begin, int64_t count, const std::byte* from) {
    const int64_t element = size_of(x.dtype);
    backend::copy(x.data + begin * element, x.device, from, Device::cpu(), count * element, stream().handle());
    stream().synchronize();
  }

  int64_t part_bytes_;
  PinnedMemory piece_, others_;
  bool shares_ = false;
};

}  // namespace

std::unique_ptr<Comm> make_host_comm(const LaunchEnv& env, Device device, std::unique_ptr<Link> link,
                                     double timeout_s) {
  return std::make_unique<HostComm>(env, device, std::move(link), timeout_s);
}

}  // namespace triad
