// Reads a model's parameters, or values with their layout such as an optimizer's moments, from files into any part of
// the flat parameter buffer, piece by piece, so a rank reads only what it keeps and needs no copy of the model.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "io/tensor_reader.h"
#include "io/weight_index.h"
#include "model/params.h"
#include "train/step/flat_buffer.h"

namespace triad {

// Names the tensor in the files from which a parameter is read; empty if the parameter keeps its values.
using NameOf = std::function<std::string(const ParamSpec&)>;
NameOf with_prefix(const std::string& prefix);

// Throws Error if the files have a tensor that no name gives and that is not in `unread`.
void check_names(const WeightIndex&, const Params&, const std::vector<NameOf>& names,
                 const std::vector<ParamSpec>& unread = {});

// Receives elements in the flat buffer, from element `begin` on: a part of one parameter.
using FlatSink = std::function<void(int64_t begin, std::span<const float> values)>;

// Passes each element of the ranges, which must not overlap, to the sink once, in any order, on the calling thread. The
// flat buffer's padding is in no file and not passed. device: where the values go. Throws an Error that names a missing
// or misshapen tensor, even one outside the ranges. Verifies the checksums of tensors that the ranges cover. Returns
// what was read for each parameter, for check_sums().
std::vector<PartialSum> read_params(const WeightIndex&, const Params&, const NameOf&,
                                    std::span<const ElementRange> ranges, Device device, const FlatSink&);

// Verifies checksums for tensors that no rank has read alone: sums come from read_params() on this rank, and all ranks'
// ranges together hold each element once. Collective: all ranks call it.
void check_sums(const WeightIndex&, const Params&, const NameOf&, const std::vector<PartialSum>& sums, Comm&);

}  // namespace triad
