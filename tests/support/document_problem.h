// Runs every op that takes documents on a row with packed documents or on one document alone, with the same code on the
// CPU and on a GPU. Results are doubles by token, so that tests compare the packed row with its documents.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "kernels/nsa/stats.h"
#include "tests/support/nsa_problem.h"

namespace triad::test {

struct DocumentShape {
  std::string name;
  std::vector<int32_t> bounds;  // one row's bounds
  int64_t Hkv, G, dk, dv;
  NsaConfig c;

  int64_t T() const { return bounds.back(); }
  int64_t Hq() const { return Hkv * G; }
  int64_t documents() const { return static_cast<int64_t>(bounds.size()) - 1; }
};

// One row's inputs: values by token, which bf16 holds exactly, and weights.
struct DocumentInput {
  explicit DocumentInput(const DocumentShape&);
  // Multiplies the document's values by `factor`, output gradients included.
  void scale_document(const DocumentShape&, int64_t document, double factor);

  std::map<std::string, Values> by_token;  // "q", "k0".."k2", "v0".."v2", "dout"
  std::map<std::string, Values> weights;   // "gate fc1_w", "phi_k w", ...
  std::map<std::string, Shape> weight_shapes;
};

struct DocumentResult {
  std::map<std::string, Values> by_token;  // outputs and activation gradients; each row belongs to one token
  std::map<std::string, Values> by_key;    // compressed keys and values; each row belongs to one compressed key
  std::map<std::string, Values> by_weight;
  Values lists;  // [T,Hkv,n]: blocks counted from the document's first token
  NsaStats stats;
};

// Runs all ops on the tokens [from, to) of the row, which is one document or, if packed, the row's documents. With
// lists (as in DocumentResult, for the same tokens), NSA attends to them instead of selecting; `selected`, if not
// nullptr, is overwritten with the lists that the selection would give for these values.
DocumentResult run_documents(const Setting&, const DocumentShape&, const DocumentInput&, int64_t from, int64_t to,
                             bool packed, const Values* lists = nullptr, Values* selected = nullptr);

}  // namespace triad::test
