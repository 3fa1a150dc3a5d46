// How an NSA model begins from the weights of a dense one: `train.init_from` with a dense checkpoint, and
// `triad import --attention nsa`.
#pragma once
#include <string>

#include "model/params.h"

namespace triad {

// The name of the dense model's tensor that begins this parameter of an NSA or mixed model: the keys and values of each
// branch (k_cmp, v_sel, ...) begin as copies of the dense k_win and v_win, with their biases and norms; every other
// tensor has the name that it has in the dense model. Empty if the parameter begins fresh: gates and phi. Shapes agree
// if the models agree in dim, n_heads, n_kv_groups, d_k and d_v.
std::string dense_source(const ParamSpec&);

}  // namespace triad
