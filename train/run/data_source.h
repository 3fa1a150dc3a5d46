// Opens the training and validation data that a run's config names.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "io/data/loader.h"
#include "io/data/needle.h"
#include "io/data/rows.h"
#include "io/json_config.h"
#include "model/flops.h"
#include "train/config/config.h"
#include "train/config/schedule.h"

namespace triad {

struct DataSource {
  Mixture train, val;
  std::vector<std::string> components;     // a mixture's components, by name; empty if all rows are of one
  std::shared_ptr<const ChatFormat> chat;  // how the conversations are written; null if there are none
  std::vector<int64_t> epoch_rows;         // how many rows an epoch of each component has; best_fit: the first epoch
  std::string description, summary;  // the data's file names and counts: in full for the log, in short for the terminal
  std::string warning;               // a problem with the data, for the user; empty if there is none
  // The most documents in a row in either split, padding included; 0: attention crosses documents, so a row counts as
  // one document.
  int64_t most_documents = 0;
  // The data's documents and how rows hold them: as a sentence for the user, and as numbers. Empty if the rows do not
  // depend on documents.
  std::string documents;
  Json document_stats;
  // The documents that the training rows hold, and with padding, as attention sees them (empty unless attention stays
  // within documents). With train.stages all numbers here are for the longest rows.
  DocumentMix parts, attended;
  RowOptions rows;  // options for the training rows

  bool within() const { return most_documents > 0; }  // attention stays within documents
};
// For shards data: fills in data.tokenizer and data.val_paths (a mixture's components' val_paths, if data.val_paths is
// not set) from manifest.json in the shards' folder. Throws
// UsageError if data.tokenizer or model.vocab_size contradicts a manifest.
void resolve_shards(Config&);
// The same for the config of a run to resume, in which an earlier start has filled these in. Only those whose files are
// gone, because the shards were moved and data.paths was set anew, are filled in again.
void resolve_moved_shards(Config&);
// Whether attention stays within documents. The only place that decides what an unset data.documents means: within, if
// both splits' documents are known. Then reads the shards' manifests.
bool attends_within(const DataConfig&);
// What data.packing is, or if it is not set, what it means for this data: best_fit for conversations in rows of one
// length.
Packing packing_of(const Config&);
// Replaces an unset data.documents and data.packing by the words for what they mean for this data; where packing was
// not set, data.max_documents follows from the data too. resume: what --resume names, or empty; a resumed run keeps
// what its checkpoint says.
void resolve_documents(Config&, const std::string& resume = "");
// tokenizer: the tokenizer that the config names; null if the caller has not loaded it. accept_changed: as in
// SplitOptions.
DataSource open_data(const Config&, const Tokenizer* tokenizer = nullptr, bool accept_changed = false);

// How a rank reads a fresh run's training rows; ranks that share sequences (dist.context) read the same ones.
LoaderOptions loader_options(const Config&, const DataSource&, int64_t rank, int64_t world);
// RunState::cursor at the end of a run that goes on from `cursor` on `world` ranks, where `step` steps are done.
int64_t last_cursor(const Config&, int64_t world, int64_t step, int64_t cursor);
// Throws a UsageError that names the component if a run on `world` ranks from `cursor` on (RunState), where `step`
// steps are done, would read more than its epochs.
void check_epochs(const Config&, const DataSource&, int64_t world, int64_t step, int64_t cursor);

// What a plan needs to know about a run's documents.
struct PlannedDocuments {
  int64_t most = 0;                   // DataSource::most_documents
  std::vector<DocumentMix> attended;  // DataSource::attended, by stage
  // False: `attended` is not known, because the data was not opened.
  bool known = true;
};
// Opens the data only if the config doesn't determine the most documents in a row.
PlannedDocuments planned_documents(const Config&);

// The needle retrieval task that the config's keys data.needle_* describe.
NeedleTask needle_task(const Config&);

}  // namespace triad
