#include "tests/fuzz/contract.h"

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "engine/process/text.h"

namespace triad::fuzz {

namespace fs = std::filesystem;

namespace {

double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Folder {
  Folder() {
    std::error_code ignored;
    const fs::path memory = "/dev/shm";
    const fs::path parent = fs::is_directory(memory, ignored) ? memory : fs::temp_directory_path();
    path = (parent / fmt::format("triad-fuzz-{}", ::getpid())).string();
    fs::create_directories(path);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  std::string path;
};

}  // namespace

void run(const Reader& reader, std::string_view bytes) {
  const double begin = processor_seconds();
  reader.read(bytes);
  const double seconds = processor_seconds() - begin;
  expect(seconds <= 1, "{}: {} bytes took {} s", reader.name, bytes.size(), seconds);
}

void check_refusal(std::string_view message, std::string_view file) {
  constexpr size_t kMost = 2000;
  expect(!message.empty() && message.size() <= kMost, "a message of {} bytes: {}", message.size(),
         message.substr(0, kMost));
  expect(message.find(file) != std::string_view::npos, "a message that does not name {}: {}", file, message);
  expect(utf8_prefix(message) == message.size(), "a message that is no UTF-8: {}", message);
  for (const char c : message)
    expect(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f, "a message with the character {}: {}",
           static_cast<int>(c), message);
}

std::string scratch_folder() {
  static const Folder folder;
  return folder.path;
}

std::string scratch_file(const std::string& name, std::string_view bytes) {
  const std::string path = scratch_folder() + "/" + name;
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  expect(out.good(), "{} cannot be written", path);
  return path;
}

std::vector<std::string_view> sections(std::string_view bytes, size_t count) {
  std::vector<std::string_view> found;
  while (found.size() + 1 < count) {
    const size_t end = std::min(bytes.find(kCut), bytes.size());
    found.push_back(bytes.substr(0, end));
    bytes.remove_prefix(std::min(end + kCut.size(), bytes.size()));
  }
  found.push_back(bytes);
  return found;
}

}  // namespace triad::fuzz
