// Document length mixes for `triad bench attention --documents`.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace triad {

// The bounds (cu_seqlens, nsa/document_tables.h) of the documents that a mix describes, in B rows of T tokens. A mix is
//   NxL + NxL + ...                N documents with L tokens each, in this order
//   lognormal:MEAN:TOTAL[:SIGMA]   lengths of a lognormal distribution with a fixed seed, TOTAL tokens in all; SIGMA is
//                                  the standard deviation of the lengths' logarithm (default 1)
// A document that a row's end cuts continues in the next row as another one. Throws a UsageError that names the mix if
// it is malformed or its token count isn't B*T.
std::vector<int32_t> mixed_bounds(const std::string& mix, int64_t B, int64_t T);

}  // namespace triad
