// Encodes text files to their documents' tokens. One thread reads the files in order, several encode, and the results
// are delivered in file order. A text file is one document; in a JSONL file, each line's record is a document
// (io/data/record.h). Empty documents are skipped.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "io/chat/chat_options.h"
#include "io/data/format/text_format.h"
#include "io/tokenizer/tokenizer.h"

namespace triad {

struct CorpusOptions {
  std::vector<std::string> files;  // paths, or kStandardInput
  TextFormat format = TextFormat::automatic;
  bool skip_bad = false;  // a line that is no record is left out and counted, where it otherwise throws
  // Encoding threads.
  int threads = 1;
  ChatOptions chat = {};  // how conversations are written
};

// A position in the corpus between two encoded pieces.
struct CorpusPosition {
  int64_t file = 0;          // index into CorpusOptions::files
  int64_t offset = 0;        // bytes before the position in the file's decompressed text
  int64_t lines = 0;         // lines before the position in a JSONL file
  int64_t documents = 0;     // documents that begin before the position, without empty ones
  bool in_document = false;  // the position is inside a document
  int64_t input_bytes = 0;   // bytes read so far from the files as stored, which may be compressed
  uint32_t stream_crc = 0;   // standard input or a pipe: CRC-32 of the bytes before the position
};

// Tokens of consecutive documents, or of a part of one, without end-of-text tokens.
struct EncodedPiece {
  struct Part {
    int64_t document;  // document number within the corpus, where empty ones do not count
    bool begins;       // true: the document begins here; false: it continues from an earlier piece
    size_t begin, end;
    bool masked = false;  // whether it comes from a record whose document has a loss mask
  };
  std::vector<Part> parts;
  std::vector<int32_t> tokens;
  std::vector<uint8_t> learned;  // a byte for each token, 1 if it is learned; empty: all are
  std::string first_masked;      // file and line of the first masked record; empty: there is none
  bool jsonl = false;            // whether the file is JSONL
  bool chats = false;            // whether a record is a conversation
  int64_t skipped = 0;           // lines that are no records (CorpusOptions::skip_bad)
  std::string first_skipped;     // what is wrong with the first one
  int64_t text_bytes = 0;
  CorpusPosition after;

  std::span<const int32_t> tokens_of(const Part& part) const {
    return std::span(tokens).subspan(part.begin, part.end - part.begin);
  }
  std::span<const uint8_t> learned_of(const Part& part) const {  // empty: all are learned
    return learned.empty() ? std::span(learned) : std::span(learned).subspan(part.begin, part.end - part.begin);
  }
};

// Calls body(piece), on the calling thread, for every piece after the position `from`, in corpus order. At most a few
// pieces are in memory at a time. For unreadable text, or a line that is no record, throws an Error that names file,
// line and offset, after delivering all pieces before it.
void encode_corpus(const CorpusOptions&, const Tokenizer&, const CorpusPosition& from,
                   const std::function<void(const EncodedPiece&)>& body);
// The same for an encoder that is no tokenizer: no masks of conversations, and chat.format may not be null.
void encode_corpus(const CorpusOptions&, const TextEncoder&, const CorpusPosition& from,
                   const std::function<void(const EncodedPiece&)>& body);

}  // namespace triad
