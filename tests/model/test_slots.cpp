// Texts that are continued together in slots (model/decoding/slots.h).
#include "model/decoding/slots.h"

#include "tests/support/decode_fixture.h"
#include "tests/support/model_fixture.h"
#include "tests/support/test.h"

namespace triad {

namespace {

constexpr int64_t kSlotContext = 32;

// What happens to texts in `slots` slots, of which `together` start at once: each step's texts that got a token, and in
// the end all tokens.
struct SlotsRun {
  std::vector<std::vector<size_t>> steps;
  std::vector<std::vector<int32_t>> texts;
};
SlotsRun run_slots(int64_t slots, int64_t together, const std::vector<size_t>& sampled) {
  const ModelConfig c = test::small_model();
  DecodeSession session(c, {.device = Device::cpu(), .batch = slots, .context = kSlotContext, .starts = true});
  session.model().params().init(session.ctx(), 7);
  Slots running(session, kSlotContext, "weights", together);
  std::vector<Continuation> texts(sampled.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    texts[i].tokens = test::DecodeFixture::random_tokens(i, 3 + static_cast<int64_t>(i), c.vocab_size);
    texts[i].prompt = texts[i].tokens.size();
    texts[i].sampling.temperature = 0;
  }
  SlotsRun result;
  for (size_t next = 0; next < texts.size() || !running.empty();) {
    while (next < texts.size() && running.has_room()) running.add(texts[next++]);
    std::vector<size_t>& took = result.steps.emplace_back();
    running.step([&](Continuation& t, int32_t token) {
      const auto i = static_cast<size_t>(&t - texts.data());
      took.push_back(i);
      t.tokens.push_back(token);
      return t.sampled() == sampled[i];
    });
  }
  for (const Continuation& t : texts) result.texts.push_back(t.tokens);
  return result;
}

}  // namespace

TEST_CASE("slots: texts wait until several can start, unless none runs or no more come", "[generate]") {
  const std::vector<size_t> sampled = {2, 4, 6, 3, 2, 1};
  using Steps = std::vector<std::vector<size_t>>;
  // Three slots. Text 3 waits for text 4.
  const SlotsRun two = run_slots(3, 2, sampled);
  CHECK(two.steps == Steps{{0, 1, 2}, {0, 1, 2}, {1, 2}, {1, 2}, {3, 4, 2}, {3, 4, 2}, {3, 5}});
  // Text 4 starts as soon as a slot is free, since no text waits for it.
  CHECK(run_slots(4, 3, {1, 2, 4, 4, 2}).steps == Steps{{0, 1, 2, 3}, {1, 2, 3}, {4, 2, 3}, {4, 2, 3}});
  // With one, each starts as soon as there is room.
  const SlotsRun one = run_slots(3, 1, sampled);
  CHECK(one.steps == Steps{{0, 1, 2}, {0, 1, 2}, {3, 1, 2}, {3, 1, 2}, {3, 4, 2}, {5, 4, 2}});
  CHECK(one.texts == two.texts);
  CHECK(run_slots(6, 0, sampled).texts == one.texts);
}

}  // namespace triad
