#include "train/checkpoint/state_part.h"

#include <algorithm>
#include <cstring>

#include "io/safetensors.h"

namespace triad {

namespace {

constexpr int64_t kFloat = sizeof(float);

std::vector<int64_t> offsets_of(const Params& params, const ParamRange& range) {
  std::vector<int64_t> offsets = {0};
  for (int64_t i = range.begin; i < range.end; ++i)
    offsets.push_back(offsets.back() + params.specs()[static_cast<size_t>(i)].shape.numel());
  return offsets;
}

}  // namespace

StatePart::StatePart(const Params& params, const ParamRange& range, Device device, int buffers)
    : params_(params),
      range_(range),
      offset_(offsets_of(params, range)),
      elements_(offset_.back()),
      memory_(device, std::max<int64_t>(1, buffers * elements_ * kFloat)) {
  // Writes to every page now, because page faults would slow down the first copy. Pinned memory needs no such step.
  if (!device.is_cuda()) std::memset(memory_.data(), 0, static_cast<size_t>(buffers * elements_ * kFloat));
}

Tensor StatePart::room(int buffer, int64_t param) const {
  const auto i = static_cast<size_t>(param - range_.begin);
  std::byte* const begin = memory_.data() + (buffer * elements_ + offset_[i]) * kFloat;
  return Tensor(begin, DType::f32, {offset_[i + 1] - offset_[i]}, Device::cpu());
}

void StatePart::copy(Context& ctx, int buffer, const ElementRange& elements, const Tensor& values) const {
  for (int64_t i = range_.begin; i < range_.end; ++i) {
    const Tensor to = room(buffer, i);
    const int64_t first = params_.offset(i), begin = std::max(elements.begin, first),
                  end = std::min(elements.end, first + to.numel());
    if (begin < end)
      triad::copy(ctx, to.slice(0, begin - first, end - first),
                  values.slice(0, begin - elements.begin, end - elements.begin));
  }
}

std::span<const float> StatePart::values(int buffer, int64_t param) const {
  const Tensor part = room(buffer, param);
  return {reinterpret_cast<const float*>(part.data), static_cast<size_t>(part.numel())};
}

void write_part(const StatePart& part, const Params& params, const std::vector<NamedBuffer>& buffers, DType dtype,
                const std::string& path) {
  std::vector<TensorSpec> specs;
  for (const NamedBuffer& b : buffers)
    for (int64_t i = part.params().begin; i < part.params().end; ++i) {
      const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
      specs.push_back({b.prefix + spec.name, dtype, spec.shape});
    }
  SafetensorsWriter file(path, specs);
  std::vector<bf16> rounded;
  for (const NamedBuffer& b : buffers)
    for (int64_t i = part.params().begin; i < part.params().end; ++i) {
      const std::string name = b.prefix + params.specs()[static_cast<size_t>(i)].name;
      const std::span<const float> values = part.values(b.buffer, i);
      if (dtype == DType::f32) {
        file.write(name, std::as_bytes(values));
        continue;
      }
      rounded.resize(values.size());
      for (size_t k = 0; k < values.size(); ++k) rounded[k] = bf16(values[k]);
      file.write(name, std::as_bytes(std::span(rounded)));
    }
  file.finish();
}

}  // namespace triad
