// Cases for packed rows' tables.
#include "kernels/nsa/cases/document_cases.h"

namespace triad {

namespace {

// The bounds are for B rows of T tokens, and may be padded at the end with B*T.
OpCase tables_case(std::string name, int64_t B, int64_t T, int64_t l_sel, const std::vector<int32_t>& bounds) {
  const auto n = static_cast<int64_t>(bounds.size());
  const auto bound = [bounds](int64_t i, uint64_t) { return static_cast<double>(bounds[static_cast<size_t>(i)]); };
  const auto table = [](std::string of, Shape shape) {
    return Arg{.name = std::move(of), .role = ArgRole::saved, .shape = shape, .type = ArgType::i32};
  };
  OpCase c{.op = "nsa_document_tables", .name = std::move(name)};
  c.args = {{.name = "bounds", .role = ArgRole::constant, .shape = {n}, .type = ArgType::i32, .fill = bound},
            table("begin", {B, T}),
            table("end", {B, T}),
            table("first_block", {B, T}),
            table("block_begin", {B, block_ids(T, l_sel, n - 1)})};
  c.forward = [l_sel](Context& ctx, const Args& a) {
    nsa_document_tables(ctx, {a["begin"], a["end"], a["first_block"], a["block_begin"]}, a["bounds"], l_sel);
  };
  return c;
}

}  // namespace

std::vector<OpCase> document_tables_cases() {
  return {tables_case("docs_1_2_3", 1, 3, 1, kSingleTokens),
          tables_case("docs_33_64_65_127", 1, 127, 8, kMixed),
          tables_case("docs_empty_tail", 1, 127, 64, kMixedPadded),
          tables_case("docs_two_rows", 2, 127, 24, kTwoRows),
          tables_case("docs_one", 1, 127, 64, {0, 127}),
          tables_case("docs_64_of_64", 1, 4096, 64, equal_documents(64, 64)),
          tables_case("docs_781_2048", 1, 2048, 64, kTwoLong),
          tables_case("docs_5000_of_1", 1, 5000, 64, equal_documents(5000, 1)),
          tables_case("docs_two_rows_of_1", 2, 1024, 64, equal_documents(2048, 1))};
}

}  // namespace triad
