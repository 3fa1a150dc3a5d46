// Encodes text files to the tokens of their documents: one thread reads the files in order, several encode, and the
// results are delivered in the order of the files. A text file is one document; in a JSONL file, each line's field
// `text` is one. Empty documents are skipped.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/tokenizer/tokenizer.h"

namespace triad {

enum class TextFormat { automatic, text, jsonl };

struct CorpusOptions {
  std::vector<std::string> files;  // paths, or kStandardInput
  // automatic: JSONL for *.jsonl and *.ndjson, compressed (.gz, .zst) or not, and for standard input that begins with {
  TextFormat format = TextFormat::automatic;
  // standard input that begins with {
  int threads = 1;
};

// A position in the corpus between two encoded pieces.
struct CorpusPosition {
  int64_t file = 0;          // in CorpusOptions::files
  int64_t offset = 0;        // bytes of the file's decompressed text
  int64_t lines = 0;         // lines of a JSONL file before it
  int64_t documents = 0;     // documents that begin before it, including empty ones
  bool in_document = false;  // the position is inside a document
  int64_t input_bytes = 0;   // bytes of the files as stored (compressed) that were read so far
  uint32_t stream_crc = 0;   // CRC-32 of the stream's bytes before it
};

// The tokens of consecutive documents or parts of documents, without end-of-text tokens.
struct EncodedPiece {
  struct Part {
    int64_t document;  // number of the document in the corpus
    bool begins;       // the document begins here; false: it began in an earlier piece
    size_t begin, end;
  };
  std::vector<Part> parts;
  std::vector<int32_t> tokens;
  int64_t text_bytes = 0;
  CorpusPosition after;
};

// Calls body(piece), on the calling thread, for every piece after `from`, in the order of the corpus. A few pieces at
// most are in memory at a time. Unreadable text, or a line that is not a JSON object with a string `text`, throws an
// Error that names file, line and offset, after all pieces before it were delivered.
void encode_corpus(const CorpusOptions&, const Tokenizer&, const CorpusPosition& from,
                   const std::function<void(const EncodedPiece&)>& body);

}  // namespace triad
