// Packed documents: the bounds check; a packed row gives what its documents give alone; no document's values reach
// another's results.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <span>

#include "kernels/nsa/document_bounds.h"
#include "tests/support/document_problem.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/document_bounds.h"

using namespace triad;
using namespace triad::test;

namespace {

using Bounds = std::vector<int32_t>;

void check_refused(const Bounds& bounds, int64_t B, int64_t T, int64_t most, const std::vector<std::string>& words) {
  check_error([&] { check_bounds(bounds, B, T, most); }, words);
  CHECK_THROWS_AS(check_bounds(bounds, B, T, most), UsageError);
}

}  // namespace

TEST_CASE("documents: bounds of whole rows are accepted", "[documents]") {
  CHECK_NOTHROW(check_bounds(Bounds{0, 127}, 1, 127, 1));
  CHECK_NOTHROW(check_bounds(Bounds{0, 1, 2, 3}, 1, 3, 3));
  CHECK_NOTHROW(check_bounds(Bounds{0, 33, 64, 65, 127}, 1, 127, 4));
  CHECK_NOTHROW(check_bounds(Bounds{0, 5, 8, 9, 16, 24}, 3, 8, 2));
}

TEST_CASE("documents: each kind of bad bounds is refused with the row and the value", "[documents]") {
  check_refused({}, 2, 8, 8, {"row 0", "nothing"});
  check_refused({0}, 2, 8, 8, {"row 0", "begin with 0", "at least one more"});
  check_refused({3, 16}, 2, 8, 8, {"row 0", "begin with 3"});
  check_refused({-4, 8, 16}, 2, 8, 8, {"row 0", "begin with -4"});
  check_refused({0, 8, -7, 16}, 2, 8, 8, {"row 1", "bound 2 is -7", "ascend"});
  check_refused({0, 8, 12, 11, 16}, 2, 8, 8, {"row 1", "bound 2 is 12", "bound 3 is 11", "ascend"});
  check_refused({0, 5, 5, 8, 16}, 2, 8, 8, {"row 0", "bound 1 is 5", "bound 2 is 5", "ascend"});
  check_refused({0, 8, 17}, 2, 8, 8, {"row 1", "bound 2 is 17", "beyond the end", "16"});
  check_refused({0, 8, 16, 17}, 2, 8, 8, {"row 1", "bound 3 is 17", "beyond the end"});
  check_refused({0, 8, 16, 16}, 2, 8, 8, {"row 1", "bound 3 is 16", "ascend"});
  check_refused({0, 3, 11, 16}, 2, 8, 8, {"row 0", "tokens 3 to 11", "end at 8"});
  check_refused({0, 8, 10, 20, 24}, 3, 8, 8, {"row 1", "tokens 10 to 20", "end at 16"});
  check_refused({0, 8, 12}, 2, 8, 8, {"row 1", "last bound is 12", "16"});
  check_refused({0, 8}, 2, 8, 8, {"row 1", "last bound is 8", "16"});
  check_refused({0, 4, 8, 9, 10, 16}, 2, 8, 2, {"row 1", "more than the 2 documents"});
  check_refused({0, 2147483647}, 1, 8, 8, {"row 0", "bound 1 is 2147483647", "beyond the end"});
}

TEST_CASE("documents: a file of bounds is read, or refused with its name", "[documents]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("bounds.i32");
  const auto write = [&](const Bounds& bounds, size_t cut = 0) {
    write_text(path, std::string(reinterpret_cast<const char*>(bounds.data()), bounds.size() * 4 - cut));
  };
  write({0, 33, 64});
  CHECK(read_document_bounds(path, 64) == Bounds{0, 33, 64});
  const auto read = [&] { read_document_bounds(path, 64); };
  write({0, 70, 64});
  check_error(read, {path, "row 0", "bound 1 is 70", "beyond the end"});
  write({0, 33, 64}, 1);
  check_error(read, {path, "11 bytes"});
  write({});
  check_error(read, {path, "nothing"});
  write(Bounds(67, 0));
  check_error(read, {path, "67 bounds", "64 tokens"});
}

// ---- each document in a packed row against the same document in its own row ----

namespace {

DocumentShape shape_of(std::string name, Bounds bounds, int64_t Hkv, int64_t G, int64_t dk, int64_t dv,
                       const NsaConfig& c, Phi phi = Phi::avg, GateKind gate = GateKind::softmax) {
  DocumentShape s{std::move(name), std::move(bounds), Hkv, G, dk, dv, c};
  s.c.phi = phi, s.c.gate.kind = gate;
  return s;
}

Bounds equal_documents(int32_t count, int32_t length) {
  Bounds bounds;
  for (int32_t i = 0; i <= count; ++i) bounds.push_back(i * length);
  return bounds;
}

const Bounds kMixed = {0, 33, 64, 65, 127};

std::vector<DocumentShape> small_shapes() {
  return {
      shape_of("[0,1,2,3]", {0, 1, 2, 3}, 2, 1, 8, 6, config(2, 1, 4, 3, 2)),
      shape_of("mixed, avg, G4", kMixed, 2, 4, 8, 8, config(8, 4, 8, 4, 12)),
      shape_of("mixed, conv, sigmoid, G2", kMixed, 1, 2, 10, 6, config(6, 3, 12, 3, 40), Phi::conv, GateKind::sigmoid),
      shape_of("mixed, mlp, G1", kMixed, 2, 1, 8, 8, config(8, 4, 8, 3, 12), Phi::mlp),
      shape_of("mixed, G16, no overlap", kMixed, 1, 16, 6, 10, config(4, 4, 4, 5, 1000)),
      shape_of("[0,781,2048], G1", {0, 781, 2048}, 1, 1, 8, 8, config(32, 16, 64, 6, 60)),
      shape_of("one document, G6", {0, 127}, 1, 6, 8, 8, config(8, 4, 8, 4, 12)),
      shape_of("64 documents of a block", equal_documents(64, 8), 1, 2, 8, 8, config(4, 2, 8, 3, 5))};
}

// Documents that begin and end inside tiles of Hopper's kernels, for every pair of head widths.
std::vector<DocumentShape> gpu_shapes() {
  const Bounds four = {0, 130, 131, 400, 700};
  return {
      shape_of("64x64, G6", four, 2, 6, 64, 64, config(32, 16, 64, 4, 100)),
      shape_of("64x64, G1, conv", four, 2, 1, 64, 64, config(32, 16, 32, 6, 100), Phi::conv, GateKind::sigmoid),
      shape_of("128x128, G16", four, 1, 16, 128, 128, config(32, 16, 64, 4, 100)),
      shape_of("128x128, G2, mlp", four, 1, 2, 128, 128, config(16, 8, 32, 6, 200), Phi::mlp),
      shape_of("192x128, G4", four, 1, 4, 192, 128, config(32, 16, 64, 4, 100)),
      shape_of("64x64, [0,781,2048]", {0, 781, 2048}, 1, 6, 64, 64, config(32, 16, 64, 6, 512)),
      shape_of("128x128, 64 documents of a block", equal_documents(64, 32), 1, 4, 128, 128, config(16, 8, 32, 4, 512)),
      shape_of("64x64, far blocks", {0, 1100, 1101, 2900}, 1, 6, 64, 64, config(32, 16, 32, 8, 100))};
}

std::vector<DocumentShape> all_shapes() {
  std::vector<DocumentShape> shapes = small_shapes();
  for (DocumentShape& s : gpu_shapes()) shapes.push_back(std::move(s));
  return shapes;
}

// Every document's results alone, in the order of the row. Compressed keys that no document uses are zeros.
DocumentResult run_alone(const Setting& setting, const DocumentShape& s, const DocumentInput& input,
                         const Values* lists = nullptr, Values* selected = nullptr) {
  DocumentResult all;
  for (size_t i = 0; i + 1 < s.bounds.size(); ++i) {
    const int64_t from = s.bounds[i], to = s.bounds[i + 1], token_entries = s.Hkv * s.c.n_sel;
    Values one_lists, one_selected;
    if (lists != nullptr) one_lists.assign(lists->begin() + from * token_entries, lists->begin() + to * token_entries);
    const DocumentResult one =
        run_documents(setting, s, input, from, to, false, lists != nullptr ? &one_lists : nullptr,
                      selected != nullptr ? &one_selected : nullptr);
    for (const auto& [name, values] : one.by_token) {
      Values& row = all.by_token[name];
      row.insert(row.end(), values.begin(), values.end());
    }
    for (const auto& [name, values] : one.by_key) {
      const int64_t width = s.Hkv * (name == "k_cmp" ? s.dk : s.dv), keys = compressed_length(s.T(), s.c.l, s.c.d);
      Values& row = all.by_key[name];
      row.resize(static_cast<size_t>(keys * width), 0.0);
      std::ranges::copy(values, row.begin() + from / s.c.d * width);
    }
    for (const auto& [name, values] : one.by_weight) {
      Values& sum = all.by_weight[name];
      sum.resize(values.size(), 0.0);
      for (size_t j = 0; j < values.size(); ++j) sum[j] += values[j];
    }
    all.lists.insert(all.lists.end(), one.lists.begin(), one.lists.end());
    if (selected != nullptr) selected->insert(selected->end(), one_selected.begin(), one_selected.end());
    all.stats.merge(one.stats);
  }
  return all;
}

// A result's tensors by name.
std::map<std::string, Values> tensors_of(const DocumentResult& r) {
  std::map<std::string, Values> all = r.by_token;
  all.insert(r.by_key.begin(), r.by_key.end());
  for (const auto& [name, values] : r.by_weight) all["d " + name] = values;
  return all;
}

// The distance between two results; infinity if an element is not finite in one and different in the other.
double distance(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return INFINITY;
    sum += (a[i] - b[i]) * (a[i] - b[i]);
  }
  return a.size() == b.size() ? std::sqrt(sum) : INFINITY;
}
// The result's norm, to which errors are compared; at least as if all elements were 0.1. A result may be zero up to
// rounding (such as the gradient for the only key that a token sees), though the inputs have unit variance.
double norm(std::span<const double> values) {
  constexpr double kSmall = 0.1;
  double sum = 0;
  for (const double x : values) sum += std::isfinite(x) ? x * x : 0;
  return std::sqrt(std::max(sum, kSmall * kSmall * static_cast<double>(values.size())));
}

void check_by_document(const DocumentShape& s, const DocumentResult& got, const DocumentResult& want,
                       double tolerance) {
  for (const auto& [name, values] : want.by_token) {
    const auto width = static_cast<int64_t>(values.size()) / s.T();
    for (size_t i = 0; i + 1 < s.bounds.size(); ++i) {
      const auto first = static_cast<size_t>(s.bounds[i] * width),
                 n = static_cast<size_t>((s.bounds[i + 1] - s.bounds[i]) * width);
      const auto a = std::span(got.by_token.at(name)).subspan(first, n), b = std::span(values).subspan(first, n);
      INFO(s.name << ": " << name << " of document " << i << " is off by " << distance(a, b) << " of " << norm(b));
      CHECK(distance(a, b) <= tolerance * norm(b));
    }
  }
}

void check_equals_alone(const Setting& setting, const DocumentShape& s, double tolerance) {
  const DocumentInput input(s);
  const DocumentResult packed = run_documents(setting, s, input, 0, s.T(), true), alone = run_alone(setting, s, input);
  INFO(s.name);
  CHECK(packed.lists == alone.lists);
  check_by_document(s, packed, alone, tolerance);
  const std::map<std::string, Values> got = tensors_of(packed);
  for (const auto& [name, want] : tensors_of(alone)) {
    INFO(name << " is off by " << distance(got.at(name), want) << " of " << norm(want));
    CHECK(distance(got.at(name), want) <= tolerance * norm(want));
  }
  for (int64_t field = 0; field < NsaStats::count; ++field) {
    INFO("field " << field << " of the statistics");
    CHECK(packed.stats.at[field] == Approx(alone.stats.at[field]).epsilon(tolerance).margin(tolerance));
  }
}

// In bf16: the packed row may be twice as far from double as its documents alone are.
void check_equals_alone_bf16(const Setting& setting, const DocumentShape& s) {
  constexpr double kFactor = 2, kFloor = 0x1p-9, kListMismatch = 0.005;
  const DocumentInput input(s);
  const DocumentResult exact = run_alone({Device::cpu(), DType::f64}, s, input);
  Values packed_lists, alone_lists;
  const DocumentResult packed = run_documents(setting, s, input, 0, s.T(), true, &exact.lists, &packed_lists);
  const DocumentResult alone = run_alone(setting, s, input, &exact.lists, &alone_lists);
  INFO(s.name);
  int64_t different = 0;
  for (size_t i = 0; i < packed_lists.size(); i += static_cast<size_t>(s.c.n_sel))
    different += !std::equal(&packed_lists[i], &packed_lists[i] + s.c.n_sel, &alone_lists[i]);
  CHECK(static_cast<double>(different) <= kListMismatch * static_cast<double>(s.T() * s.Hkv));
  const std::map<std::string, Values> got = tensors_of(packed), reference = tensors_of(alone);
  for (const auto& [name, want] : tensors_of(exact)) {
    const double error = distance(got.at(name), want), limit = distance(reference.at(name), want);
    INFO(name << " is " << error << " off double, alone " << limit << ", of " << norm(want));
    CHECK(error <= kFactor * limit + kFloor * norm(want));
  }
}

// ---- documents are independent ----

bool same_bits(std::span<const double> a, std::span<const double> b) {
  return std::ranges::equal(a, b, {}, std::bit_cast<uint64_t, double>, std::bit_cast<uint64_t, double>);
}

// Multiplies all values in one document at a time: every document if there are few or the row is short, else the first,
// middle and last. All other results keep every bit.
void check_independence(const Setting& setting, const DocumentShape& s) {
  constexpr int64_t kFew = 8, kShort = 512;  // documents; tokens
  constexpr double kFactor = 1000;
  const DocumentInput input(s);
  const DocumentResult before = run_documents(setting, s, input, 0, s.T(), true);
  std::vector<int64_t> changed = {0, s.documents() / 2, s.documents() - 1};
  if (s.documents() <= kFew || s.T() <= kShort) {
    changed.resize(static_cast<size_t>(s.documents()));
    std::iota(changed.begin(), changed.end(), 0);
  }
  for (const int64_t document : changed) {
    DocumentInput scaled = input;
    scaled.scale_document(s, document, kFactor);
    const DocumentResult after = run_documents(setting, s, scaled, 0, s.T(), true);
    INFO(s.name << ", changed document " << document);
    CHECK(before.by_token.at("out") != after.by_token.at("out"));
    for (size_t i = 0; i + 1 < s.bounds.size(); ++i) {
      if (static_cast<int64_t>(i) == document) continue;
      const int64_t from = s.bounds[i], length = s.bounds[i + 1] - from;
      const auto check = [&](const std::string& name, const Values& a, const Values& b, int64_t first, int64_t rows,
                             int64_t width) {
        INFO(name << " of document " << i);
        const auto part = [&](const Values& v) {
          return std::span(v).subspan(static_cast<size_t>(first * width), static_cast<size_t>(rows * width));
        };
        CHECK(same_bits(part(a), part(b)));
      };
      for (const auto& [name, values] : before.by_token)
        check(name, values, after.by_token.at(name), from, length, static_cast<int64_t>(values.size()) / s.T());
      for (const auto& [name, values] : before.by_key)
        check(name, values, after.by_key.at(name), from / s.c.d, compressed_length(length, s.c.l, s.c.d),
              s.Hkv * (name == "k_cmp" ? s.dk : s.dv));
      check("lists", before.lists, after.lists, from, length, s.Hkv * s.c.n_sel);
    }
  }
}

}  // namespace

TEST_CASE("documents: a packed row equals its documents alone (CPU)", "[documents]") {
  for (const DocumentShape& s : small_shapes()) {
    check_equals_alone({Device::cpu(), DType::f64}, s, 1e-9);
    check_equals_alone({Device::cpu(), DType::f32}, s, 1e-5);
    check_equals_alone_bf16({Device::cpu(), DType::bf16}, s);
  }
}
TEST_CASE("documents: a packed row equals its documents alone (GPU)", "[documents][gpu]") {
  if (!require_gpu()) return;
  for (const DocumentShape& s : all_shapes()) {
    check_equals_alone({Device::cuda(), DType::f32}, s, 5e-5);
    check_equals_alone_bf16({Device::cuda(), DType::bf16}, s);
  }
}

TEST_CASE("documents: the values of one change no bit of another's results (CPU)", "[documents]") {
  for (const DocumentShape& s : small_shapes())
    for (const DType dtype : {DType::f32, DType::bf16}) check_independence({Device::cpu(), dtype}, s);
}
TEST_CASE("documents: the values of one change no bit of another's results (GPU)", "[documents][gpu]") {
  if (!require_gpu()) return;
  for (const DocumentShape& s : all_shapes())
    for (const DType dtype : {DType::f32, DType::bf16}) check_independence({Device::cuda(), dtype}, s);
}
