#include "train/checkpoint/state_part.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/safetensors.h"
#include "kernels/ops/cast.h"

namespace triad {

namespace {

std::vector<std::vector<int64_t>> begins_of(const Params& params, const ParamRange& range,
                                            const std::vector<StatePart::Buffer>& buffers) {
  std::vector<std::vector<int64_t>> all;
  for (const StatePart::Buffer& buffer : buffers) {
    std::vector<int64_t> begins = {all.empty() ? 0 : align_up(all.back().back())};
    for (int64_t i = range.begin; i < range.end; ++i) {
      const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
      const bool held = !buffer.has || buffer.has(spec);
      begins.push_back(begins.back() + (held ? spec.shape.numel() * size_of(buffer.dtype) : 0));
    }
    all.push_back(std::move(begins));
  }
  return all;
}

}  // namespace

StatePart::StatePart(const Params& params, const ParamRange& range, Device device, std::vector<Buffer> buffers)
    : params_(params),
      range_(range),
      buffers_(std::move(buffers)),
      begin_(begins_of(params, range, buffers_)),
      memory_(device, std::max<int64_t>(1, begin_.back().back())) {
  // Writes to every page now, because page faults would slow down the first copy. Pinned memory needs no such step.
  if (!device.is_cuda()) std::memset(memory_.data(), 0, static_cast<size_t>(begin_.back().back()));
}

Tensor StatePart::values(int buffer, int64_t param) const {
  const auto i = static_cast<size_t>(param - range_.begin);
  const std::vector<int64_t>& begin = begin_[static_cast<size_t>(buffer)];
  return Tensor(memory_.data() + begin[i], dtype(buffer), {(begin[i + 1] - begin[i]) / size_of(dtype(buffer))},
                Device::cpu());
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
