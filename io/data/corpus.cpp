#include "io/data/corpus.h"

#include <zlib.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "engine/check.h"
#include "io/chat/chat_format.h"
#include "io/data/format/text_format.h"
#include "io/data/record.h"
#include "io/data/text_input.h"

namespace triad {

namespace {

constexpr size_t kPieceBytes = 1 << 20;
constexpr size_t kMostBytes = 1 << 28;  // most bytes in a line or word, which must be in memory as a whole

// A piece of text that one thread encodes.
struct Work {
  int64_t number = 0;
  std::string file;
  std::string text;
  struct Line {
    size_t begin, end;
    int64_t number, offset;
  };
  std::vector<Line> lines;  // lines of `text`, for a JSONL file
  EncodedPiece piece;       // a text file's only part, which may be encoded already
  bool encoded = false;
  bool skip_bad = false;  // CorpusOptions::skip_bad
  const ChatOptions* chat = nullptr;
};

// A line's record; nullopt if it is skipped.
std::optional<Record> record_of(const Work& work, const Work::Line& line, const std::string& place,
                                EncodedPiece& piece) {
  try {
    return parse_record(std::string_view(work.text).substr(line.begin, line.end - line.begin), place, *work.chat);
  } catch (const Error& e) {
    if (!work.skip_bad) throw;
    if (piece.skipped++ == 0) piece.first_skipped = e.what();
    return std::nullopt;
  }
}

std::string text_of(const Record& record) {
  std::string text;
  for (const Record::Part& part : record.parts) text += part.text;
  return text;
}

// Encodes a conversation, whose text is tokenized as a whole. A token is learned if any of its bytes is. A separator
// with which a template begins, such as its bos_token, is the one that precedes the document.
void encode_chat(const Record& record, const Tokenizer& tokenizer, EncodedPiece& piece) {
  const std::string text = text_of(record);
  std::vector<int32_t> tokens = tokenizer.encode(text);
  const bool same = tokenizer.decode(tokens) == text;
  std::vector<size_t> ends;
  size_t end = 0;
  for (const Record::Part& part : record.parts) {
    end += part.text.size();
    // Where the tokenizer changes texts (NFC, for example), what comes before the end is changed like the whole.
    ends.push_back(same ? end : tokenizer.decode(tokenizer.encode(text.substr(0, end))).size());
  }
  size_t part = 0, at = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const size_t to = at + tokenizer.decode({&tokens[i], 1}).size();
    while (part < ends.size() && ends[part] <= at) ++part;
    bool learned = false;
    for (size_t p = part; p < ends.size() && (p == part || ends[p - 1] < to); ++p)
      learned = learned || record.parts[p].learned;
    at = to;
    if (i == 0 && tokens[0] == tokenizer.eot()) continue;
    piece.tokens.push_back(tokens[i]);
    piece.learned.push_back(learned ? 1 : 0);
  }
  piece.text_bytes += static_cast<int64_t>(text.size());
  piece.chats = true;
}

// tokenizer: the encoder, if it is one; null: what is learned of conversations does not matter.
void encode(Work& work, const TextEncoder& encoder, const Tokenizer* tokenizer) {
  EncodedPiece& piece = work.piece;
  if (work.encoded) return;
  if (!work.piece.jsonl) {
    encoder.append(work.text, piece.tokens);
    piece.parts[0].end = piece.tokens.size();
    return;
  }
  for (const Work::Line& line : work.lines) {
    const std::string place = fmt::format("{}: line {}, at offset {}", work.file, line.number, line.offset);
    const std::optional<Record> record = record_of(work, line, place, piece);
    if (!record || record->empty()) continue;
    const size_t begin = piece.tokens.size();
    if (record->masked && piece.first_masked.empty()) piece.first_masked = place, piece.learned.assign(begin, 1);
    if (record->chat && tokenizer != nullptr) {
      encode_chat(*record, *tokenizer, piece);
    } else if (record->chat) {
      const std::string text = text_of(*record);
      encoder.append(text, piece.tokens);
      piece.text_bytes += static_cast<int64_t>(text.size());
    }
    for (const Record::Part& part : record->chat ? std::span<const Record::Part>() : std::span(record->parts)) {
      if (!part.text.empty()) encoder.append(part.text, piece.tokens);
      if (!piece.first_masked.empty()) piece.learned.resize(piece.tokens.size(), part.learned ? 1 : 0);
      piece.text_bytes += static_cast<int64_t>(part.text.size());
    }
    piece.parts.push_back({0, true, begin, piece.tokens.size(), record->masked});
  }
}

// Connects the threads: the reading thread fills todo_, the encoding threads move pieces from todo_ to done_, and run()
// takes pieces from done_ in reading order.
class Pipeline {
 public:
  Pipeline(const CorpusOptions& options, const TextEncoder& encoder, const Tokenizer* tokenizer)
      : options_(options), encoder_(encoder), tokenizer_(tokenizer), most_(2 * options.threads + 2) {}
  ~Pipeline() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void run(const CorpusPosition& from, const std::function<void(const EncodedPiece&)>& body) {
    int64_t documents = from.documents;
    threads_.emplace_back([this, from] { read_all(from); });
    for (int i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { encode_all(); });
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return done_.contains(taken_) || (read_to_end_ && taken_ == read_); });
      if (read_to_end_ && taken_ == read_) {
        if (error_of_reading_) std::rethrow_exception(error_of_reading_);
        return;
      }
      Done done = std::move(done_.extract(taken_).mapped());
      ++taken_;
      lock.unlock();
      changed_.notify_all();
      if (done.error) std::rethrow_exception(done.error);
      // Numbered here, in order, because only the encoding knows which documents are empty.
      for (EncodedPiece::Part& part : done.piece.parts) part.document = part.begins ? documents++ : documents - 1;
      done.piece.after.documents = documents;
      body(done.piece);
    }
  }

 private:
  struct Done {
    EncodedPiece piece;
    std::exception_ptr error;
  };
  struct Stopped {};  // thrown in the reading thread, to end it

  bool stopped() {
    const std::lock_guard lock(mutex_);
    return stop_;
  }

  void enqueue(Work work) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stop_ || read_ - taken_ < most_; });
    if (stop_) throw Stopped();
    work.number = read_++;
    todo_.push_back(std::move(work));
    lock.unlock();
    changed_.notify_all();
  }

  void encode_all() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !todo_.empty() || read_to_end_; });
      if (stop_ || todo_.empty()) return;
      Work work = std::move(todo_.front());
      todo_.pop_front();
      lock.unlock();
      std::exception_ptr error;
      try {
        encode(work, encoder_, tokenizer_);
      } catch (...) { error = std::current_exception(); }
      lock.lock();
      done_.emplace(work.number, Done{std::move(work.piece), error});
      lock.unlock();
      changed_.notify_all();
    }
  }

  void read_all(CorpusPosition at) {
    std::exception_ptr error;
    try {
      int64_t bytes_before = 0;  // total size of earlier files
      for (int64_t i = 0; i < at.file; ++i) bytes_before += bytes_of(options_.files[static_cast<size_t>(i)]);
      for (bool resumed = true; at.file < static_cast<int64_t>(options_.files.size()); resumed = false) {
        const std::string& path = options_.files[static_cast<size_t>(at.file)];
        TextInput input(path, [this] { return stopped(); });
        const bool jsonl = content_of(input, options_.format) == Content::jsonl;
        if (resumed) skip(input, path, at);
        read_file(input, path, jsonl, at, bytes_before);
        bytes_before += bytes_of(path);
        at = {.file = at.file + 1, .input_bytes = bytes_before};
      }
    } catch (const Stopped&) {
    } catch (...) { error = std::current_exception(); }
    {
      const std::lock_guard lock(mutex_);
      error_of_reading_ = error;
      read_to_end_ = true;
    }
    changed_.notify_all();
  }

  void skip(TextInput& input, const std::string& path, const CorpusPosition& at) {
    std::string text(kPieceBytes, '\0');
    uint32_t crc = 0;
    for (int64_t done = 0; done < at.offset;) {
      const size_t n = input.read({text.data(), std::min(text.size(), static_cast<size_t>(at.offset - done))});
      TRIAD_CHECK(n > 0, "{}: ends at offset {} of its text, before offset {}, where this is to go on", input.name(),
                  done, at.offset);
      if (is_stream(path)) crc = update(crc, {text.data(), n});
      done += static_cast<int64_t>(n);
    }
    TRIAD_CHECK(!is_stream(path) || crc == at.stream_crc,
                "{}: its first {} bytes are not those of the call that is to be continued", input.name(), at.offset);
  }

  static int64_t bytes_of(const std::string& path) {
    return is_stream(path) ? 0 : static_cast<int64_t>(std::filesystem::file_size(path));
  }

  static uint32_t update(uint32_t crc, std::string_view text) {
    return static_cast<uint32_t>(crc32_z(crc, reinterpret_cast<const Bytef*>(text.data()), text.size()));
  }

  // Reads a file to its end and advances the position `at` accordingly.
  void read_file(TextInput& input, const std::string& path, bool jsonl, CorpusPosition& at, int64_t bytes_before) {
    std::string text;  // text that was read but not queued yet
    bool end = false;
    size_t wanted = kPieceBytes;
    while (!end || !text.empty()) {
      const size_t have = text.size();
      if (have < wanted && !end) {
        text.resize(wanted);
        const size_t n = input.read({text.data() + have, wanted - have});
        text.resize(have + n);
        end = text.size() < wanted;
      }
      if (text.empty()) break;
      Work work;
      work.file = input.name();
      work.piece.jsonl = jsonl;
      work.skip_bad = options_.skip_bad;
      work.chat = &options_.chat;
      const size_t used = jsonl ? take_lines(text, end, work, at) : take_text(text, end, work, at);
      if (used == 0) {  // the first line or word does not end within `text`
        TRIAD_CHECK(text.size() < kMostBytes,
                    "{}: at offset {} a {} of more than {} bytes, which would have to be in memory whole", input.name(),
                    at.offset, jsonl ? "line" : "text that this tokenizer cannot cut", kMostBytes);
        wanted = text.size() * 2;
        continue;
      }
      wanted = kPieceBytes;
      if (is_stream(path)) at.stream_crc = update(at.stream_crc, std::string_view(text).substr(0, used));
      at.offset += static_cast<int64_t>(used);
      at.input_bytes = bytes_before + input.bytes_taken();
      std::string rest = text.substr(used);
      if (!work.encoded) {
        text.resize(used);
        work.text = std::move(text);
      }
      text = std::move(rest);
      work.piece.after = at;
      enqueue(std::move(work));
    }
    at.in_document = false;
  }

  static size_t take_lines(std::string_view text, bool end, Work& work, CorpusPosition& at) {
    size_t used = 0;
    while (used < text.size()) {
      const size_t newline = text.find('\n', used);
      if (newline == std::string_view::npos && !end) break;
      const size_t line_end = std::min(newline, text.size());
      ++at.lines;
      if (!is_blank_line(text.substr(used, line_end - used)))
        work.lines.push_back({used, line_end, at.lines, at.offset + static_cast<int64_t>(used)});
      used = std::min(line_end + 1, text.size());
    }
    return used;
  }

  // Makes `work` from the beginning of a text file, which is one document, and returns the bytes that it uses. A
  // document that fits into one piece is encoded later, by any encoding thread, and so are a longer document's pieces
  // if the encoder knows where to cut them. Otherwise they are encoded here, because only their tokens determine where
  // the next piece begins.
  size_t take_text(std::string_view text, bool end, Work& work, CorpusPosition& at) const {
    EncodedPiece& piece = work.piece;
    size_t used = text.size();
    if (!end) {
      used = encoder_.safe_cut(text);
      work.encoded = used == 0;
      if (work.encoded) used = encoder_.append_prefix(text, piece.tokens);
      if (used == 0) return 0;
    }
    const bool begins = !at.in_document;
    at.in_document = !end;
    piece.parts.push_back({0, begins, 0, piece.tokens.size()});
    piece.text_bytes = static_cast<int64_t>(used);
    return used;
  }

  const CorpusOptions& options_;
  const TextEncoder& encoder_;
  const Tokenizer* const tokenizer_;
  const int64_t most_;  // most pieces in memory

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> todo_;
  std::map<int64_t, Done> done_;  // finished pieces, by their number
  int64_t read_ = 0, taken_ = 0;
  bool read_to_end_ = false, stop_ = false;
  std::exception_ptr error_of_reading_;
  std::vector<std::thread> threads_;
};

}  // namespace

void encode_corpus(const CorpusOptions& options, const TextEncoder& encoder, const CorpusPosition& from,
                   const std::function<void(const EncodedPiece&)>& body) {
  Pipeline(options, encoder, nullptr).run(from, body);
}

void encode_corpus(const CorpusOptions& options, const Tokenizer& tokenizer, const CorpusPosition& from,
                   const std::function<void(const EncodedPiece&)>& body) {
  CorpusOptions complete = options;
  complete.chat = with_format(options.chat, tokenizer);
  Pipeline(complete, tokenizer, &tokenizer).run(from, body);
}

}  // namespace triad
