// Muon (Jordan et al. 2024) for linear layers' matrices. Updates are scaled as by Liu et al. (arXiv 2502.16982): their
// root mean square is then about the same as with AdamW, so both optimizers take the same lr and weight decay.
//   g' = g * clip;  m = b m + (1 - b) g';  u = b m + (1 - b) g'            muon_momentum()
//   o = the Newton-Schulz iteration of u                                   newton_schulz()
//   p = p (1 - lr * decay) - lr * 0.2 sqrt(max(R, C)) * o                  muon_apply()
// clip is AdamW's (kernels/update/adamw.h). The iteration normalizes u, so the momentum needs no correction for the
// start.
//
// The matrices are in the flat buffers; u and o are in a separate buffer, where matrices of one shape are contiguous. A
// table of pieces maps the two, so that one kernel updates many matrices. p and m in bf16 are updated in f32 and
// rounded stochastically, with the random bits that AdamW would use; u is computed from m before its rounding.
#pragma once
#include <algorithm>
#include <functional>
#include <vector>

#include "engine/context.h"
#include "kernels/update/split_master.h"

namespace triad {

struct MuonOptions {
  double lr = 0, momentum = 0.95, weight_decay = 0;
  double grad_clip = 0;
  // For state in bf16: this optimizer step's number, from 1 on, and the run's seed.
  int64_t step = 1;
  uint64_t seed = 0;
  // Where param, weights, m and grad begin in the flat parameter buffer.
  int64_t first_element = 0;
};

inline constexpr double kMuonScale = 0.2;

// A table row: elements in one matrix.
struct MuonPiece {
  int64_t element = 0;  // first element's index in the flat parameter buffer
  int64_t at = 0;       // the same element's index in u and o
  int64_t count = 0;    // kMost elements at most
  int64_t longest = 0;  // the matrix's max(R, C)
  static constexpr int64_t kMost = 1 << 13;
  static constexpr int64_t kFields = 4;
};

// A matrix [rows, cols] that begins at this element in the flat parameter buffer.
struct MuonMatrix {
  int64_t element = 0, rows = 0, cols = 0;
  int64_t size() const { return rows * cols; }
};

// MuonPlan: which matrices are updated together, and which rank iterates which. Pure.
class MuonPlan {
 public:
  // Matrices with the same shape.
  struct Group {
    int64_t n = 0, rows = 0, cols = 0;
    int64_t per_rank = 0;  // rank r iterates the matrices [r * per_rank, (r + 1) * per_rank); 0: each rank iterates all
    int64_t at = 0;        // the first one's index in the updates, or with per_rank in its rank's part
    int64_t size() const { return rows * cols; }
    // How many matrices a rank iterates.
    int64_t count(int64_t rank) const {
      return per_rank == 0 ? n : std::clamp<int64_t>(n - rank * per_rank, 0, per_rank);
    }
  };
  // A batch's update buffer begins with an equal part for each rank; groups that all ranks iterate follow.
  struct Batch {
    int64_t first_piece = 0, end_piece = 0;
    int64_t elements = 0;  // elements in the whole buffer
    int64_t part = 0;      // elements in one rank's part
    std::vector<Group> groups;
    // Index in the updates, for the first of the group's matrices that a rank iterates.
    int64_t at(const Group& g, int64_t rank) const { return g.at + (g.per_rank == 0 ? 0 : rank * part); }
  };
  // The most elements in a batch's updates, unless one matrix has more: all of the M7C model's matrices fit, whose
  // products then fill a GPU, and the updates in bf16 take 192 MiB.
  static constexpr int64_t kMostElements = int64_t{96} << 20;

  MuonPlan() = default;
  // ranks: how many share a group, if it has a matrix for each.
  explicit MuonPlan(const std::vector<MuonMatrix>&, int64_t ranks = 1, int64_t most_elements = kMostElements);

  int64_t ranks() const { return ranks_; }
  const std::vector<Batch>& batches() const { return batches_; }
  const std::vector<MuonPiece>& pieces() const { return pieces_; }

 private:
  void add_batch(const std::vector<MuonMatrix>&);
  int64_t ranks_ = 1;
  std::vector<Batch> batches_;
  std::vector<MuonPiece> pieces_;
};

// What an update reads and writes: param [n] f32 or bf16 and m [n] f32 or bf16, updated; weights [n] bf16, overwritten
// with param rounded to nearest (absent if param is itself the weight)  <-  grad [n] f32 or bf16; grad_norm_squared [1]
// f64 in device memory; pieces [pieces, MuonPiece::kFields] i64, the plan's table in device memory. Nothing outside the
// plan's matrices is changed, and nothing at all if grad_norm_squared is not finite. On the CPU all may be f64. With
// split masters (split_master.h) param is the remainder, and weights and ties are updated too.
struct MuonTensors {
  Tensor param, weights, m;
  ConstTensor grad, grad_norm_squared, pieces;
  TieBits ties = {};
};

// The dtype of u and o: bf16 on a GPU, f32 on the CPU, f64 if the state is.
inline DType muon_dtype(const Context& ctx, DType state = DType::f32) {
  return ctx.device.is_cuda() ? DType::bf16 : acc_dtype(state);
}
// Updates all matrices in the plan. If several ranks have the same tensors and share the work, `rank` is this rank, and
// gather(parts) must queue an all-gather on parts [ranks * part], into which each rank has written its part. Later work
// on ctx.stream must wait for it.
using GatherParts = std::function<void(const Tensor& parts)>;
void muon(Context&, const MuonPlan&, const MuonTensors&, const MuonOptions&, int64_t rank = 0,
          const GatherParts& gather = {});

// muon()'s parts. u [any] f32 or bf16: overwritten where the pieces are; undefined if grad_norm_squared is not finite.
// t.pieces: the pieces in one batch, or in a part of one.
void muon_momentum(Context&, Tensor u, const MuonTensors& t, const MuonOptions&);
// Iterates a rank's matrices in place.
void orthogonalize(Context&, const MuonPlan::Batch&, Tensor updates, int64_t rank);
void muon_apply(Context&, const MuonTensors& t, ConstTensor o, const MuonOptions&);

namespace cuda {
void muon_momentum(Context&, Tensor u, const MuonTensors&, const MuonOptions&);
void muon_apply(Context&, const MuonTensors&, ConstTensor o, const MuonOptions&);
}  // namespace cuda
}  // namespace triad
