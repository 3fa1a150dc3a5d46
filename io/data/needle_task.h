// Parameters of the synthetic tasks for `data.kind: needle`, without the sequences (io/data/needle.h).
#pragma once
#include <cstdint>
#include <string_view>
#include <utility>

#include "engine/fields.h"

namespace triad {

// What a sequence asks. A statement is a few adjacent tokens among random ones, and the mark is the vocabulary's last
// token. [value] is value_tokens tokens, [name] is one key.
//
//            statements                                     question, after all statements   answer
// keys       key [value]                                    key                              [value]
// queries    key [value]                                    key                              [value]
// variables  mark name [value]; mark next_name name; ...    mark last_name                   [value]
// counting   key, once or several times                     mark key                         how often, one token
// copy       mark [span of any tokens]                      mark                             [span], value_tokens long
//
// keys without a depth is different: questions are at any later position, so that a sequence has many (needle.h).
// In all other cases the questions end the sequence, one after the other, each about another key or chain. variables
// without a depth asks about any name in a chain, so that a model can learn one assignment after the other.
enum class NeedleKind { keys, queries, variables, counting, copy };

template <>
struct EnumWords<NeedleKind> {
  static constexpr std::pair<std::string_view, NeedleKind> words[] = {{"keys", NeedleKind::keys},
                                                                      {"queries", NeedleKind::queries},
                                                                      {"variables", NeedleKind::variables},
                                                                      {"counting", NeedleKind::counting},
                                                                      {"copy", NeedleKind::copy}};
};

// A task's parameters. Token 0 begins a sequence; a third each of the other tokens are keys, value tokens, and hay. A
// sequence is a pure function of the seed and the sequence's number.
struct NeedleTask {
  NeedleKind kind = NeedleKind::keys;
  int64_t vocab = 0, seq_len = 0;
  int64_t pairs = 64;  // keys with a value, chains (variables), or keys that occur (counting) per sequence
  // keys: mean questions per key; every second key has exactly one. Other kinds: questions at the end.
  int64_t questions = 1;
  int64_t value_tokens = 1;  // tokens in a value, or in copy's span
  int64_t hops = 2;          // variables: assignments from name to name in a chain
  int64_t occurrences = 8;   // counting: a key occurs between once and so many times, each equally likely
  // In [0, 1]: how deep the first question's needle is, as in needle_probe. -1: any depth; for keys, all keys are
  // asked, at any later position.
  double depth = -1;
  uint64_t seed = 0;

  int64_t kinds() const { return (vocab - 1) / 3; }  // how many different keys, and different value tokens, there are
  int32_t first_value() const { return static_cast<int32_t>(1 + kinds()); }
  int32_t first_hay() const { return static_cast<int32_t>(1 + 2 * kinds()); }
  int32_t mark() const { return static_cast<int32_t>(vocab - 1); }  // keys and queries have no mark: it is hay there
  // The answer of counting.
  int32_t count_token(int64_t count) const { return static_cast<int32_t>(first_value() + count - 1); }
  // Throws a UsageError, which names the config's keys and the limits, if a sequence of seq_len tokens cannot hold the
  // task.
  void check() const;
};

}  // namespace triad
