// Which kernel took each call of an op that has several, and how often it was not the fast one: a fallback, which has a
// reason. Filled in where the choice is made, while work is queued; no kernel runs for it. A CUDA graph's replays are
// not seen: counts are of calls.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

class Routes {
 public:
  struct Count {
    int64_t layer;                   // -1 outside of the layers
    std::string op, kernel, reason;  // reason: empty where this is the kernel meant for the call
    int64_t calls;
    bool is_fallback() const { return !reason.empty(); }
  };

  void record(std::string_view op, std::string_view kernel, std::string_view reason = {});
  void set_layer(int64_t layer) { layer_ = layer; }  // of the calls that follow
  int64_t layer() const { return layer_; }

  const std::vector<Count>& counts() const { return counts_; }  // in the order of their first call
  int64_t fallbacks() const;
  // "3 fallbacks: nsa_select general (heads of 60) 3 times", all layers together; "no fallbacks".
  std::string summary() const;

 private:
  int64_t layer_ = -1;
  std::vector<Count> counts_;
};

// The branch of NSA that an op belongs to, by its name: cmp, sel, win, select (the scores and the top-n), else the op.
std::string branch_of(std::string_view op);

}  // namespace triad
