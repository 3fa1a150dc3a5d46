// Sequences of `data.kind: needle`, tasks that recall over a distance. Statements (the needles), such as keys followed
// by their values, are placed among random tokens (the hay). Questions about some follow, and the model must predict
// the answers. Only the answers are targets, because everything else is unpredictable. needle_task.h lists the task
// kinds.
#pragma once
#include <cstdint>
#include <vector>

#include "io/data/dataset.h"
#include "io/data/needle_task.h"

namespace triad {

// Training and validation sequences for the task. Without a depth, sequences of keys have random positions: half of
// those drawn for a key are uniform, half at a log-uniform distance from the position drawn before, so that short
// distances, which are learned first, are frequent enough. A key's first draw is uniform in two thirds of the cases,
// and else at a log-uniform distance from the sequence's beginning, where windows hold few tokens. All other sequences
// are as in needle_probe, without a depth at a random position in the same range.
DataSplit needle_data(const NeedleTask&, double val_fraction);

// A test sequence with a needle at one depth. It has `length` tokens and ends in the questions with their answers, but
// for the very last token. Depth 0 is the position after the token that begins the sequence, depth 1 the last position
// before the questions that has room. At `depth` is what the first question is about:
//   keys, queries  the key's first occurrence,
//   variables      the value's assignment; the chain's other assignments follow in order, at random positions,
//   counting       the key's first occurrence; the others follow at random positions,
//   copy           the mark before the span.
// Other needles surround it: as densely as in training, as far as there are different keys, or as many as asked for.
// The other questions' needles are at random positions.
struct NeedleProbe {
  std::vector<int32_t> tokens, targets;  // targets are -1, except for the answers
  int64_t needle = 0;                    // the first question's needle begins here
};
// The fewest tokens a probe needs to hold what is asked. needles: as in needle_probe.
int64_t shortest_probe(const NeedleTask&, int64_t needles = 0);
// Makes a probe. number: the probe's number for this length and depth. needles: how many it has, those asked about
// included; 0: as densely as in training. A probe is unlikely to equal a training or validation sequence. Throws a
// UsageError for a depth outside [0, 1], a length too short for the needles asked for, a vocabulary that is too small
// for them, or fewer needles than questions.
NeedleProbe needle_probe(const NeedleTask&, int64_t length, double depth, uint64_t number, int64_t needles = 0);

}  // namespace triad
