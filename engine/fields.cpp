#include "engine/fields.h"

#include <fmt/format.h>

#include <cmath>

namespace triad {

std::string Rule::str() const {
  if (std::isinf(min) && std::isinf(max)) return "any number";
  if (std::isinf(max)) return fmt::format("{} {}", min_is_open ? "above" : "at least", min);
  if (std::isinf(min)) return fmt::format("at most {}", max);
  return fmt::format("in {}{}, {}]", min_is_open ? "(" : "[", min, max);
}

}  // namespace triad
