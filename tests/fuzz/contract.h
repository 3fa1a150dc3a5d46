// What every reader of files promises: any bytes are either read, or refused by an Error whose message is clear; never
// a crash, never more than a second, never memory out of proportion. The readers' entry functions, one a kind of file,
// hold a reader to it; libFuzzer calls them with bytes it makes up (main.cpp), the tests with the kept corpora.
#pragma once
#include <fmt/core.h>

#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "engine/check.h"

namespace triad::fuzz {

struct Reader {
  const char* name;  // of its corpus too
  void (*read)(std::string_view bytes);
};
void read_shard(std::string_view bytes);           // the bytes are a file
void read_safetensors(std::string_view bytes);     // the bytes are a file; or sections: its header, its data
void read_tokenizer_json(std::string_view bytes);  // sections: tokenizer.json, a text to encode
void read_tokenizer_pair(std::string_view bytes);  // sections: encoder.json, vocab.bpe, a text to encode
void read_config(std::string_view bytes);          // sections: a config file, --set assignments, a line each
void read_handshake(std::string_view bytes);       // the bytes came from a socket: a frame of handshake.h
inline constexpr Reader kReaders[] = {{"shard", read_shard},
                                      {"safetensors", read_safetensors},
                                      {"tokenizer_json", read_tokenizer_json},
                                      {"tokenizer_pair", read_tokenizer_pair},
                                      {"config", read_config},
                                      {"handshake", read_handshake}};

// The promise is broken. It is no triad::Error: nothing that a reader throws may pass for a refusal.
class Broken : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};
template <class... Args>
void expect(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) throw Broken(fmt::vformat(format, fmt::make_format_args(args...)));
}

// Calls the reader; Broken if that takes more than a second of the processor's time.
void run(const Reader&, std::string_view bytes);

// A refusal is one line of a person's size, printable UTF-8, and names the file.
void check_refusal(std::string_view message, std::string_view file);

// What read() makes of a file; nothing if it refused it.
template <class F>
auto read_or_refuse(std::string_view file, F&& read) -> std::optional<std::invoke_result_t<F>> {
  try {
    return read();
  } catch (const Error& e) {
    check_refusal(e.what(), file);
    return std::nullopt;
  }
}
// For readers that return nothing: whether it was read.
template <class F>
bool accepts(std::string_view file, F&& read) {
  return read_or_refuse(file, [&] { return read(), true; }).has_value();
}

// The path of a file with these bytes, in a folder in memory that is this process's own. A later one of that name
// replaces it.
std::string scratch_file(const std::string& name, std::string_view bytes);
std::string scratch_folder();

// Inputs of several files are cut at lines of "%%". Sections that are not there are empty.
inline constexpr std::string_view kCut = "\n%%\n";
std::vector<std::string_view> sections(std::string_view bytes, size_t count);

}  // namespace triad::fuzz
