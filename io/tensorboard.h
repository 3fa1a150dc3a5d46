// TensorBoard's event files, without TensorFlow (FORMATS.md section 2a): records framed by their length and masked
// CRC-32C, each an Event message of protocol buffers, written by hand.
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

uint32_t crc32c(std::string_view bytes);  // Castagnoli

struct Scalar {
  std::string tag;
  double value;
};

// The messages, and the frame around one.
namespace tensorboard {
std::string file_version(double wall_time);  // the first of a file
std::string scalars(double wall_time, int64_t step, std::span<const Scalar>);
// Of values that are finite; the others are left out.
std::string histogram(double wall_time, int64_t step, std::string_view tag, std::span<const double> values);
// A text for the plugin "text", which shows it as Markdown.
std::string text(double wall_time, int64_t step, std::string_view tag, std::string_view markdown);
// For the plugin "hparams": what a run was asked for, at its begin, and that it has ended well.
using HParam = std::pair<std::string, std::variant<bool, double, std::string>>;
std::string session_start(double wall_time, std::span<const HParam>);
std::string session_end(double wall_time);
// Readers forget what files before this one hold from this step on.
std::string restart(double wall_time, int64_t step);
std::string record(std::string_view message);
}  // namespace tensorboard

// One file of a run, in its folder tb/; a resumed run adds another. Each call is one write.
class EventFile {
 public:
  // resume_step >= 0: what earlier files tell of later steps no longer counts.
  EventFile(const std::string& folder, int64_t resume_step);

  void add(int64_t step, std::span<const Scalar>);
  void add(int64_t step, std::string_view tag, std::span<const double> values);  // a histogram
  void add_text(int64_t step, std::string_view tag, std::string_view markdown);
  void add_session_start(std::span<const tensorboard::HParam>);
  void add_session_end();

 private:
  AppendFile file_;
};

}  // namespace triad
