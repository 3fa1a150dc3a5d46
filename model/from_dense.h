// How an NSA model begins from a dense one's weights: `train.init_from` with a dense checkpoint, and `triad import
// --attention nsa`.
#pragma once
#include <span>
#include <string>

#include "model/params.h"

namespace triad {

// Names the dense model's tensor that begins this parameter in an NSA or mixed model: each branch's keys and values
// (k_cmp, v_sel, ...) begin as copies of the dense k_win and v_win, with their biases and norms; every other
// tensor has the name that it has in the dense model. Empty if the parameter begins fresh: gates, phi and index. Shapes
// agree if the models agree in dim, n_heads, n_kv_groups, d_k and d_v.
std::string dense_source(const ParamSpec&);

// What begins fresh, for a log: "12 tensors begin fresh (gates, index)". Empty if nothing does.
std::string describe_fresh(std::span<const ParamSpec> fresh);

}  // namespace triad
