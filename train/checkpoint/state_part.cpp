#include "train/checkpoint/state_part.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/safetensors.h"
#include "kernels/ops/cast.h"

namespace triad {

namespace {

std::vector<int64_t> offsets_of(const Params& params, const ParamRange& range) {
  std::vector<int64_t> offsets = {0};
  for (int64_t i = range.begin; i < range.end; ++i)
    offsets.push_back(offsets.back() + params.specs()[static_cast<size_t>(i)].shape.numel());
  return offsets;
}

std::vector<int64_t> begins_of(int64_t elements, const std::vector<DType>& dtypes) {
  std::vector<int64_t> begins = {0};
  for (const DType dtype : dtypes) begins.push_back(align_up(begins.back() + elements * size_of(dtype)));
  return begins;
}

}  // namespace

StatePart::StatePart(const Params& params, const ParamRange& range, Device device, std::vector<DType> dtypes)
    : params_(params),
      range_(range),
      offset_(offsets_of(params, range)),
      dtypes_(std::move(dtypes)),
      begin_(begins_of(offset_.back(), dtypes_)),
      memory_(device, std::max<int64_t>(1, begin_.back())) {
  // Writes to every page now, because page faults would slow down the first copy. Pinned memory needs no such step.
  if (!device.is_cuda()) std::memset(memory_.data(), 0, static_cast<size_t>(begin_.back()));
}

Tensor StatePart::values(int buffer, int64_t param) const {
  const auto i = static_cast<size_t>(param - range_.begin);
  std::byte* const begin = memory_.data() + begin_[static_cast<size_t>(buffer)] + offset_[i] * size_of(dtype(buffer));
  return Tensor(begin, dtype(buffer), {offset_[i + 1] - offset_[i]}, Device::cpu());
}

void StatePart::copy(Context& ctx, int buffer, const ElementRange& elements, const Tensor& values) const {
  for (int64_t i = range_.begin; i < range_.end; ++i) {
    const Tensor to = this->values(buffer, i);
    const int64_t first = params_.offset(i), begin = std::max(elements.begin, first),
                  end = std::min(elements.end, first + to.numel());
    if (begin < end)
      triad::copy(ctx, to.slice(0, begin - first, end - first),
                  values.slice(0, begin - elements.begin, end - elements.begin));
  }
}

void write_part(const StatePart& part, const Params& params, const std::vector<NamedBuffer>& buffers,
                const std::string& path, std::optional<DType> dtype) {
  const auto written = [&](const NamedBuffer& b) { return dtype.value_or(part.dtype(b.buffer)); };
  std::vector<TensorSpec> specs;
  for (const NamedBuffer& b : buffers)
    for (int64_t i = part.params().begin; i < part.params().end; ++i) {
      const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
      if (b.has(spec)) specs.push_back({b.prefix + spec.name, written(b), spec.shape});
    }
  SafetensorsWriter file(path, specs);
  Runtime cpu({.device = Device::cpu()});
  std::vector<std::byte> converted;
  for (const NamedBuffer& b : buffers)
    for (int64_t i = part.params().begin; i < part.params().end; ++i) {
      const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
      if (!b.has(spec)) continue;
      Tensor values = part.values(b.buffer, i);
      if (values.dtype != written(b)) {
        converted.resize(static_cast<size_t>(values.numel() * size_of(written(b))));
        const Tensor to(converted.data(), written(b), values.shape(), Device::cpu());
        cast(cpu.ctx(), to, values);
        values = to;
      }
      file.write(b.prefix + spec.name, {values.data, static_cast<size_t>(values.bytes())});
    }
  file.finish();
}

}  // namespace triad
