#include "tests/support/model_fixture.h"

#include "engine/rng.h"
#include "train/inference.h"

namespace triad::test {

ModelConfig small_model() {
  ModelConfig c;
  c.dim = 20, c.n_layers = 2, c.n_heads = 6, c.n_kv_groups = 2, c.d_k = 6, c.d_v = 5, c.vocab_size = 37;
  c.nsa.l = 8, c.nsa.d = 4, c.nsa.l_sel = 8, c.nsa.n_sel = 4, c.nsa.w = 11;
  c.resolve();
  return c;
}

ModelConfig layered_model() {
  ModelConfig c = small_model();
  c.n_layers = 4;
  c.nsa.layers = {
      {.layers = "1:2", .l = 6, .d = 2, .l_sel = 4, .n_sel = 6, .w = 5, .init_blocks = 0, .local_blocks = 1},
      {.layers = "2:3", .branches = Branches::window, .w = 9},
      {.layers = "3:4",
       .branches = Branches::selected,
       .l_sel = 4,
       .n_sel = 5,
       .selector = Selector::index,
       .d_index = 6}};
  c.resolve();
  return c;
}

ModelConfig changed(const std::function<void(ModelConfig&)>& change) {
  ModelConfig c = small_model();
  c.n_layers = 4;
  change(c);
  c.resolve();
  return c;
}

std::set<std::string> names_of_layer(const ModelConfig& c, int64_t layer) {
  std::set<std::string> names;
  const std::string prefix = "blocks." + std::to_string(layer) + ".";
  for (const ParamSpec& p : param_specs(c))
    if (p.name.starts_with(prefix)) names.insert(p.name.substr(prefix.size()));
  return names;
}

ModelFixture::ModelFixture(const ModelConfig& config, int64_t B, int64_t T, Device device, DType dtype, uint64_t seed,
                           double std, const RecomputePlan& recompute, const KernelChoices& kernels,
                           int64_t most_documents, const std::vector<bool>& fp8_layers,
                           const std::optional<LoraConfig>& lora) {
  const Model::Options options{
      .dtype = dtype, .training = true, .max_seq_len = T, .fp8_layers = fp8_layers, .lora = lora};
  int64_t arena = 0, scratch = 0;
  {
    Runtime plan({.device = device, .planning = true, .kernels = kernels});
    Model model(plan.ctx(), plan.arena(), config, options);
    Activations act(plan.arena(), config, B, T, dtype, true, recompute, most_documents);
    model.forward(plan.ctx(), act);
    model.loss(plan.ctx(), act);
    model.loss_and_backward(plan.ctx(), act, 1);
    scratch = plan.scratch().peak_bytes();
    arena = plan.arena().used_bytes() + align_up(scratch);
  }
  runtime_ = std::make_unique<Runtime>(
      Runtime::Options{.device = device, .arena_bytes = arena, .scratch_bytes = scratch, .kernels = kernels});
  model_ = std::make_unique<Model>(ctx(), runtime_->arena(), config, options);
  act_ = std::make_unique<Activations>(runtime_->arena(), config, B, T, dtype, true, recompute, most_documents);

  const auto draw = [&](const Params& params) {
    std::vector<float> values(static_cast<size_t>(params.stored_elements()), 0.0f);
    for (int64_t i = 0; i < params.count(); ++i) {
      const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
      const Philox random(seed, static_cast<uint64_t>(spec.number));
      for (int64_t j = 0; j < spec.shape.numel(); ++j)
        values[static_cast<size_t>(params.offset(i) + j)] =
            static_cast<float>(std * random.normal(static_cast<uint64_t>(j)));
    }
    return values;
  };
  host_ = draw(model_->params());
  upload();
  if (Params* const base = model_->base()) base->set(ctx(), draw(*base));
  std::vector<int32_t> tokens, targets;
  const Philox random(seed, 1u << 20);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t <= T; ++t) {
      const int32_t token = static_cast<int32_t>(
          random.below(static_cast<uint64_t>(b * (T + 1) + t), static_cast<uint64_t>(config.vocab_size)));
      if (t < T) tokens.push_back(token);
      if (t > 0) targets.push_back(token);
    }
  write(ctx(), act_->tokens, tokens.data());
  write(ctx(), act_->targets, targets.data());
  if (act_->padding_begin.empty()) return;
  const std::vector<int32_t> no_padding(static_cast<size_t>(B), static_cast<int32_t>(T));
  write(ctx(), act_->padding_begin, no_padding.data());
}

void ModelFixture::set_documents(std::vector<int32_t> bounds) {
  const Tensor to = act_->bounds;
  bounds.resize(static_cast<size_t>(to.numel()), static_cast<int32_t>(act_->rows()));
  write(ctx(), to, bounds.data());
}

double ModelFixture::mean_loss() {
  long double sum = 0;
  for (const double loss : read_floats(ctx(), act_->row_loss)) sum += loss;
  return static_cast<double>(sum / act_->rows());
}

double ModelFixture::loss() {
  model_->forward(ctx(), *act_);
  model_->loss(ctx(), *act_);
  return mean_loss();
}

double ModelFixture::loss_and_grads() {
  zero(ctx(), model_->params().grads());
  model_->forward(ctx(), *act_);
  model_->loss_and_backward(ctx(), *act_, 1.0 / static_cast<double>(act_->rows()));
  return mean_loss();
}

std::vector<double> ModelFixture::grad(int64_t i) {
  return read_floats(ctx(), model_->params().part(model_->params().grads(), i));
}

double ModelFixture::get_f64(int64_t i, int64_t element) {
  return model_->params().part(model_->params().weights(), i).ptr<double>()[element];
}
void ModelFixture::set_f64(int64_t i, int64_t element, double value) {
  model_->params().part(model_->params().weights(), i).ptr<double>()[element] = value;
}

double ModelFixture::central_difference(int64_t i, int64_t element) {
  constexpr double kStep = 1e-5;
  const double x = get_f64(i, element);
  set_f64(i, element, x + kStep);
  const double above = loss();
  set_f64(i, element, x - kStep);
  const double below = loss();
  set_f64(i, element, x);
  return (above - below) / (2 * kStep);
}

std::vector<int32_t> ModelFixture::lists(int64_t layer) {
  const Tensor t = act_->layer(layer).attention.nsa.block_index;
  std::vector<int32_t> out(static_cast<size_t>(t.numel()));
  read(ctx(), out.data(), t);
  return out;
}
void ModelFixture::set_lists(int64_t layer, const std::vector<int32_t>& lists) {
  write(ctx(), act_->layer(layer).attention.nsa.block_index, lists.data());
  model_->keep_block_index(true);
}

}  // namespace triad::test
