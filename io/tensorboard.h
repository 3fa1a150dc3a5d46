// Writes TensorBoard event files without TensorFlow. A file is a sequence of TFRecords (length, data and masked CRC-32C
// sums), each with one Event message, encoded as protocol buffers (io/README.md has the layout).
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "io/file.h"

namespace triad {

// The writer that the second record of each file names, by which Triad's files are recognised.
inline constexpr const char* kEventWriter = "triad.io.tensorboard";

uint32_t crc32c(std::string_view bytes);  // CRC-32C, polynomial 0x1EDC6F41 (Castagnoli)

struct Scalar {
  std::string tag;
  double value;
};

// Functions that encode Event messages, and the TFRecord frame around one. wall_time: seconds since the epoch.
namespace tensorboard {
std::string file_version(double wall_time);  // the first record of every file
std::string scalars(double wall_time, int64_t step, std::span<const Scalar>);
// A histogram over the finite values; others are dropped.
std::string histogram(double wall_time, int64_t step, std::string_view tag, std::span<const double> values);
// A text for the plugin "text", which renders it as Markdown.
std::string text(double wall_time, int64_t step, std::string_view tag, std::string_view markdown);
// For the plugin "hparams": the hyperparameters at a run's start, and the message that the run ended successfully.
using HParam = std::pair<std::string, std::variant<bool, double, std::string>>;
std::string session_start(double wall_time, std::span<const HParam>);
std::string session_end(double wall_time);
// A message after which readers drop earlier files' events from this step on.
std::string restart(double wall_time, int64_t step);
// Names the program that has written a file.
std::string written_by(double wall_time, std::string_view writer);
std::string record(std::string_view message);
}  // namespace tensorboard

// EventFile: one event file in a run's folder tb/; a resumed run adds another file, whose name sorts after the others.
// Each call is one write(2).
class EventFile {
 public:
  // resume_step >= 0: makes readers drop earlier files' events after that step.
  EventFile(const std::string& folder, int64_t resume_step);

  void add(int64_t step, std::span<const Scalar>);
  void add(int64_t step, std::string_view tag, std::span<const double> values);  // adds a histogram of the values
  void add_text(int64_t step, std::string_view tag, std::string_view markdown);
  void add_session_start(std::span<const tensorboard::HParam>);
  void add_session_end();

 private:
  AppendFile file_;
};

}  // namespace triad
