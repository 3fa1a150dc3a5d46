// What a run's training rows hold of documents, measured when the data are opened.
#pragma once
#include "train/config/schedule.h"
#include "train/run/data_source.h"

namespace triad {

// Throws a UsageError if data.max_documents would limit nothing.
void check_max_documents(const Config&);
// Fills in DataSource::rows, epoch_rows and what a run knows about its documents; of these nothing if its rows do not
// depend on them. A mixture's numbers are means over its rows.
void describe_documents(const Config&, DataSource&);
// DataSource::attended for a stage's rows.
DocumentMix attended_in(const DataSource&, const TrainStage&);

double ratio(int64_t a, int64_t b);  // a / b; 0 if b is 0
std::string percent(double ratio);

}  // namespace triad
