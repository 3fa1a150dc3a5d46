// From texts to the tokens of their documents: files are read in order, encoded by all cores, and come out in order
// again. A text file is a document; of JSONL each line's field `text` is one. What holds no byte is none.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/tokenizer/tokenizer.h"

namespace triad {

enum class TextFormat { automatic, text, jsonl };

struct CorpusOptions {
  std::vector<std::string> files;             // or kStandardInput
  TextFormat format = TextFormat::automatic;  // JSONL: *.jsonl and *.ndjson, packed (.gz, .zst) or not, and
                                              // standard input that begins with {
  int threads = 1;
};

// A place between two pieces that were encoded.
struct CorpusPosition {
  int64_t file = 0;          // in CorpusOptions::files
  int64_t offset = 0;        // of its text, unpacked
  int64_t lines = 0;         // of a JSONL file that lie before it
  int64_t documents = 0;     // that begin before it, empty ones too
  bool in_document = false;  // the last one goes on
  int64_t input_bytes = 0;   // of the files, packed as they are, that were read up to here
  uint32_t stream_crc = 0;   // of the bytes before it
};

// Tokens of documents one behind the other, without end-of-text tokens.
struct EncodedPiece {
  struct Part {
    int64_t document;  // its number in the corpus
    bool begins;       // here; otherwise it began in a piece before
    size_t begin, end;
  };
  std::vector<Part> parts;
  std::vector<int32_t> tokens;
  int64_t text_bytes = 0;
  CorpusPosition after;
};

// Calls body(piece), on this thread, for all that lies behind `from`; pieces come in the corpus's order whatever the
// threads do, and a few of them at most are in memory at a time. Text that cannot be read, and a line that is no JSON
// object with a string `text`, are Errors that name file, line and offset, after all that lies before them.
void encode_corpus(const CorpusOptions&, const Tokenizer&, const CorpusPosition& from,
                   const std::function<void(const EncodedPiece&)>& body);

}  // namespace triad
