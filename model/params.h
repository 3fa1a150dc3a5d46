// A model's parameters. One list defines names, shapes, weight decay and initial values; Params stores them in up to
// three flat buffers. The matrices in one product (q and the branches' k and v; SwiGLU's gate and up) are stored
// contiguously, so that the engine uses them as one matrix; files have one tensor for each (model/README.md lists the
// names).
#pragma once
#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/context.h"
#include "model/config.h"

namespace triad {

// What a parameter is used for. A layer has one parameter per role, except that with NSA it has one k_proj, v_proj,
// k_bias, v_bias and k_norm per branch, unless the branches share them (nsa.shared_kv).
enum class ParamRole : uint8_t {
  embed,
  norm1,
  // q_proj: its tensor in LayerTensors is qkv, the whole fused projection.
  q_proj,
  k_proj,
  v_proj,
  // q_bias, q_norm: their tensors in LayerTensors are qkv_bias and qk_norm, which contain k's and v's too.
  q_bias,
  k_bias,
  v_bias,
  q_norm,
  k_norm,
  phi_k_conv,
  phi_k_pos,
  phi_k_fc1,
  phi_k_fc2,
  phi_v_conv,
  phi_v_pos,
  phi_v_fc1,
  phi_v_fc2,
  gate_fc1_weight,
  gate_fc1_bias,
  gate_fc2_weight,
  gate_fc2_bias,
  // index_q_proj, index_q_norm: their tensors in LayerTensors are index and index_norm, which contain those of k too.
  index_q_proj,
  index_k_proj,
  index_q_norm,
  index_k_norm,
  out_proj,
  norm2,
  mlp_in,
  // mlp_up: SwiGLU's second input matrix; in LayerTensors it's part of mlp_in.
  mlp_up,
  mlp_out,
  norm_f,
  head,
  // The adapters of LoRA (lora.h), by LoraPlace: A and B of a layer's adapted projections.
  lora_qkv_a,
  lora_qkv_b,
  lora_out_proj_a,
  lora_out_proj_b,
  lora_mlp_in_a,
  lora_mlp_in_b,
  lora_mlp_out_a,
  lora_mlp_out_b
};
constexpr bool is_adapter(ParamRole r) { return r >= ParamRole::lora_qkv_a; }
// A layer's linear layers, as the engine multiplies them; each may have adapters.
enum class LoraPlace : uint8_t { qkv, out_proj, mlp_in, mlp_out };
inline constexpr size_t kLoraPlaces = 4;
constexpr bool is_gate(ParamRole r) { return r >= ParamRole::gate_fc1_weight && r <= ParamRole::gate_fc2_bias; }
constexpr bool is_phi(ParamRole r) { return r >= ParamRole::phi_k_conv && r <= ParamRole::phi_v_fc2; }
// Whether a parameter belongs to a taught index: it learns from a loss of its own, which moves no other parameter.
constexpr bool is_index(ParamRole r) { return r >= ParamRole::index_q_proj && r <= ParamRole::index_k_norm; }
// Whether parameters with this role only compute keys: the projection with its bias, the norm, and the keys' phi.
constexpr bool is_key(ParamRole r) {
  return r == ParamRole::k_proj || r == ParamRole::k_bias || r == ParamRole::k_norm ||
         (r >= ParamRole::phi_k_conv && r <= ParamRole::phi_k_fc2);
}

struct ParamSpec {
  enum class Init { normal, uniform, constant };
  ParamRole role;
  int64_t layer = -1;  // layer index; -1: outside the layers
  // The NSA branch that a parameter in k, v or phi belongs to; none for other roles, dense attention and what all
  // branches share.
  Branch branch = Branch::none;
  std::string name;
  Shape shape;  // shape in files and reports, without padding
  Init init = Init::normal;
  // Standard deviation of normal initial values, bound of uniform ones, or the constant initial value.
  double value = 0;
  std::vector<double> values = {};  // constant initial values by element; empty: `value` for each
  int64_t padded_rows = 0;          // stored rows in embedding and head; 0: shape[0]
  bool joins_previous = false;      // stored directly after the previous one, as rows of one matrix or as one vector
  // True if backward's first contribution to its gradient is a matrix product, which can overwrite old values.
  bool product = false;
  int64_t number = 0;   // its initial values' random stream; the model's parameters are counted
  bool frozen = false;  // not trained: neither gradient nor optimizer state
  bool decays() const { return shape.rank >= 2; }
  bool is_layer_product() const { return product && layer >= 0; }
  Shape stored() const;
};

// Whether a pass in which all layers attend densely (Model::attend_densely) uses a parameter: all but gates, phi, and
// the other branches' keys and values.
inline bool used_by_dense_pass(const ParamSpec& spec) {
  return !is_gate(spec.role) && spec.branch != Branch::cmp && spec.branch != Branch::sel;
}

// All parameters' specs in forward order, which all files and reports use; those of taught indices follow all others,
// whose initial values are therefore the same with and without an index.
std::vector<ParamSpec> param_specs(const ModelConfig&);
int64_t count_parameters(const ModelConfig&);
// out [n] overwritten with elements [first, first + n) of a parameter's initial values. They depend only on these
// arguments: any range can be drawn alone, with the same bits on every device.
void draw_values(Context&, const ParamSpec&, int64_t first, Tensor out, uint64_t seed);

template <class TensorType>
struct LoraTensors {
  TensorType a, b;  // kernels/ops/lora.h; absent without adapters
};

// One layer's tensors as its forward and backward use them: weights (ConstTensor) or gradients (Tensor).
template <class TensorType>
struct LayerTensors {
  TensorType norm1, qkv, out_proj, norm2;  // qkv: [Hq*dk + Hkv*(dk+dv) summed over branches, C]
  TensorType qkv_bias;                     // [qkv rows]; absent without model.qkv_bias
  TensorType qk_norm;     // [(1 + branches)*dk]: weights for q, then for each branch's k; absent without model.qk_norm
  TensorType index;       // [(Hkv+1)*d_index, C]: its queries' rows, then its key's; absent without an index
  TensorType index_norm;  // [2*d_index]: weights for its queries, then for its key; absent without model.qk_norm
  TensorType mlp_in, mlp_out;  // mlp_in: fc1 [H,C], for swiglu gate and up [2H,C]; mlp_out: fc2 or down [C,H]
  NsaWeightTensors<TensorType> nsa;
  std::array<LoraTensors<TensorType>, kLoraPlaces> lora;  // index: LoraPlace
};
// Calls f(role, tensor) for each tensor in a layer's attention weights; tensors that the model lacks are empty.
template <class NsaTensors, class F>
void for_each_tensor_of_nsa(NsaTensors& nsa, F&& f) {
  f(ParamRole::phi_k_conv, nsa.phi_k.w);
  f(ParamRole::phi_k_pos, nsa.phi_k.pos);
  f(ParamRole::phi_k_fc1, nsa.phi_k.fc1);
  f(ParamRole::phi_k_fc2, nsa.phi_k.fc2);
  f(ParamRole::phi_v_conv, nsa.phi_v.w);
  f(ParamRole::phi_v_pos, nsa.phi_v.pos);
  f(ParamRole::phi_v_fc1, nsa.phi_v.fc1);
  f(ParamRole::phi_v_fc2, nsa.phi_v.fc2);
  f(ParamRole::gate_fc1_weight, nsa.gate.fc1_w);
  f(ParamRole::gate_fc1_bias, nsa.gate.fc1_b);
  f(ParamRole::gate_fc2_weight, nsa.gate.fc2_w);
  f(ParamRole::gate_fc2_bias, nsa.gate.fc2_b);
}
// Calls f(role, tensor) for each tensor in a layer; tensors that the model lacks are empty.
template <class Layer, class F>
void for_each_tensor(Layer& layer, F&& f) {
  f(ParamRole::norm1, layer.norm1);
  f(ParamRole::q_proj, layer.qkv);
  f(ParamRole::q_bias, layer.qkv_bias);
  f(ParamRole::q_norm, layer.qk_norm);
  f(ParamRole::index_q_proj, layer.index);
  f(ParamRole::index_q_norm, layer.index_norm);
  f(ParamRole::out_proj, layer.out_proj);
  f(ParamRole::norm2, layer.norm2);
  f(ParamRole::mlp_in, layer.mlp_in);
  f(ParamRole::mlp_out, layer.mlp_out);
  for_each_tensor_of_nsa(layer.nsa, f);
  for (size_t i = 0; i < kLoraPlaces; ++i) {
    f(static_cast<ParamRole>(static_cast<size_t>(ParamRole::lora_qkv_a) + 2 * i), layer.lora[i].a);
    f(static_cast<ParamRole>(static_cast<size_t>(ParamRole::lora_qkv_b) + 2 * i), layer.lora[i].b);
  }
}

template <class TensorType>
struct ModelTensors {
  // Embed and head: [padded vocabulary, C]; with tied embeddings both are the same tensor.
  TensorType embed, norm_f, head;
  std::vector<LayerTensors<TensorType>> layers;
};

// Elements [begin, end) in a flat buffer.
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool overlaps(const ElementRange& other) const { return begin < other.end && other.begin < end; }
  bool contains(const ElementRange& other) const { return begin <= other.begin && other.end <= end; }
};

// The flat buffers are divided into segments: one layer's matrices, the head, the embedding, and the rest, which holds
// all layers' small parameters. Forward and backward use one layer's segment after the other. A segment's number: the
// layer's index; then what the functions below return.
class Segments {
 public:
  Segments(int64_t layers, bool tied) : layers_(layers), tied_(tied), ranges_(static_cast<size_t>(rest() + 1)) {}
  int64_t head() const { return layers_; }  // tied embeddings: the head is the embedding
  int64_t embed() const { return tied_ ? layers_ : layers_ + 1; }
  int64_t rest() const { return embed() + 1; }
  int64_t count() const { return rest() + 1; }
  bool is_layer(int64_t segment) const { return segment < layers_; }
  int64_t of(const ParamSpec&) const;
  int64_t holding(const ElementRange&) const;  // the segment that contains a range; -1: no single one does
  const ElementRange& operator[](int64_t segment) const { return ranges_[static_cast<size_t>(segment)]; }
  ElementRange& operator[](int64_t segment) { return ranges_[static_cast<size_t>(segment)]; }

 private:
  int64_t layers_;
  bool tied_;
  std::vector<ElementRange> ranges_;
};

// FlatBuffer: a flat buffer's memory. A whole one has memory for each element. A windowed one (the layer ring) has
// memory for the rest, for the embedding or the head, and for two layers: segments that share memory use it in turn,
// and the caller orders their uses. Layers with even and odd index alternate.
class FlatBuffer {
 public:
  FlatBuffer() = default;
  // overlap: the embedding and the head also share the layers' memory.
  static FlatBuffer windowed(Arena&, MemTag, const char* name, DType, const Segments&, bool overlap);
  explicit FlatBuffer(Tensor whole) : memory_(whole) {}

  bool is_windowed() const { return !places_.empty(); }
  Tensor memory() const { return memory_; }
  // Elements in a range, which lies in one segment if the buffer is windowed.
  Tensor at(const ElementRange&, const Segments&) const;
  // Which elements of the memory a segment has.
  ElementRange place(int64_t segment, const Segments& segments) const {
    return is_windowed() ? places_[static_cast<size_t>(segment)] : segments[segment];
  }

 private:
  Tensor memory_;
  std::vector<ElementRange> places_;  // segments' places; empty: whole
};

// Params: flat buffers for all parameters. weights: in the compute dtype. master: fp32 master weights, only for
// training in bf16 (in fp32, or if there are none, the weights are their own master). grads: in the accumulation dtype,
// only for training.
class Params {
 public:
  struct Options {
    DType dtype = DType::f32;
    bool master = false;  // allocate a separate fp32 weight copy, which the optimizer updates
    bool grads = false;
    // Segments are padded to a multiple of this many elements, so ranks have equal shards.
    int64_t shard_elements = 1;
    // The buffer has memory only for the segments in use (FlatBuffer).
    bool weight_windows = false, grad_windows = false;
    // Which of the model's parameters the buffers hold; absent: all. Tensors of the others are empty.
    std::optional<std::vector<ParamSpec>> specs = {};
    const char* weights_name = "weights";  // the weights' name in the arena
  };
  Params(Arena&, const ModelConfig&, const Options&);

  const std::vector<ParamSpec>& specs() const { return specs_; }
  int64_t count() const { return static_cast<int64_t>(specs_.size()); }
  // Whole buffers, each [stored elements], in three groups: matrix product parameters, other parameters with weight
  // decay, which end at decay_end(), and parameters without weight decay. Those of taught indices are next to
  // one another at decay_end(), in index_range(), which has whole pieces of kSumPiece elements. weights() and grads()
  // throw for windowed buffers.
  Tensor weights() const { return whole(weights_, "weights"); }
  Tensor master() const { return master_.empty() ? weights() : master_; }
  Tensor grads() const { return whole(grads_, "gradients"); }
  // The same, whole or windowed.
  const FlatBuffer& weight_buffer() const { return weights_; }
  const FlatBuffer& grad_buffer() const { return grads_; }
  Tensor weights(const ElementRange& range) const { return weights_.at(range, segments_); }
  Tensor grads(const ElementRange& range) const { return grads_.at(range, segments_); }
  const Segments& segments() const { return segments_; }
  // From here on, a segment's gradient memory holds these: with gradients in the layer ring, and after lend_grads() for
  // the layers' segments. Zeroes the elements that backward does not overwrite: those between parameters, and gradients
  // without ParamSpec::product.
  void open_grads(Context&, int64_t segment);
  // Allows other values in whole gradients' layer segments outside backward, until open_grads().
  void lend_grads();
  // The element range that a part of the gradients covers. Throws Error if it is none.
  ElementRange range_of_grad(ConstTensor part) const;
  // The part of grads() that belongs to parameters without ParamSpec::product; it must be zeroed before a backward.
  Tensor added_grads() const { return grads().slice(0, products_end_, stored_elements_); }
  bool has_master() const { return !master_.empty(); }
  int64_t decay_end() const { return decay_end_; }
  const ElementRange& index_range() const { return index_; }  // empty without an index
  int64_t stored_elements() const { return stored_elements_; }
  // Parameter i in its logical shape, as part of the flat buffer `whole` (weights(), grads(), an optimizer's moments,
  // ...).
  Tensor part(const Tensor& whole, int64_t i) const;

  ModelTensors<ConstTensor> weight_tensors() const { return tensors<ConstTensor>(weights_); }
  ModelTensors<Tensor> grad_tensors() const { return tensors<Tensor>(grads_); }

  // Parameter i's first element in a flat buffer.
  int64_t offset(int64_t i) const { return offset_[i]; }

  // Initializes the weights from a seed, on their device. The values are the same on every device and for every dtype,
  // up to rounding.
  void init(Context&, uint64_t seed);
  // init() for parameter i alone; its padding isn't changed.
  void init(Context&, int64_t i, uint64_t seed);
  // Sets master weights and weights from values in host memory: the whole flat buffer, or from element `begin` on.
  // clear() sets all to 0, padding included.
  void set(Context&, const std::vector<float>& stored);
  void set(Context&, int64_t begin, std::span<const float> values);
  void clear(Context&);

 private:
  template <class TensorType>
  ModelTensors<TensorType> tensors(const FlatBuffer&) const;
  Tensor stored(const FlatBuffer&, int64_t i, int64_t rows) const;
  static Tensor whole(const FlatBuffer&, const char* name);
  void list_cleared();

  ModelConfig config_;
  std::vector<ParamSpec> specs_;
  std::vector<int64_t> offset_;
  Segments segments_;
  int64_t products_end_ = 0, decay_end_ = 0, stored_elements_ = 0;
  ElementRange index_;
  FlatBuffer weights_, grads_;
  Tensor master_;
  bool lent_ = false;
  // With windowed or lent gradients: by segment the ranges that open_grads() zeroes, and the segments opened last in
  // their memory.
  std::vector<std::vector<ElementRange>> cleared_;
  std::vector<int64_t> open_;
};

// out [end - begin] overwritten with elements [begin, end) in the flat buffer that init() fills; padding is 0.
void draw_range(Context&, const Params&, int64_t begin, int64_t end, Tensor out, uint64_t seed);

}  // namespace triad
