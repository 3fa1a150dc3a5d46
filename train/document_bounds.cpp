#include "train/document_bounds.h"

#include <span>

#include "engine/check.h"
#include "io/file.h"
#include "kernels/nsa/document_bounds.h"

namespace triad {

std::vector<int32_t> read_document_bounds(const std::string& path, int64_t T) {
  const InputFile file(path);
  constexpr int64_t kWidth = sizeof(int32_t);
  const int64_t count = file.size() / kWidth;
  if (file.size() % kWidth != 0)
    fail_usage("{}: {} bytes are not whole 32-bit integers, the bounds of documents", path, file.size());
  if (count > T + 1) fail_usage("{}: {} bounds, but a row of {} tokens has at most {}", path, count, T, T + 1);
  std::vector<int32_t> bounds(static_cast<size_t>(count));
  file.read(0, std::as_writable_bytes(std::span(bounds)));
  try {
    check_bounds(bounds, 1, T, T);
  } catch (const UsageError& e) { fail_usage("{}: {}", path, e.what()); }
  return bounds;
}

}  // namespace triad
