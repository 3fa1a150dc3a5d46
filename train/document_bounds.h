// Reads `triad grads --documents`'s file.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace triad {

// Returns a file's 32-bit integers: the document bounds in one row of T tokens, as check_bounds
// (kernels/nsa/document_bounds.h) requires. Throws a UsageError that names the file.
std::vector<int32_t> read_document_bounds(const std::string& path, int64_t T);

}  // namespace triad
