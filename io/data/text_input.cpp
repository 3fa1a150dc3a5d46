#include "io/data/text_input.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "io/foreign_format.h"

namespace triad {

namespace {
constexpr size_t kBufferBytes = 1 << 18;

bool begins_gzip(std::string_view bytes) { return bytes.starts_with("\x1f\x8b"); }
bool begins_zstd(std::string_view bytes) {
  const bool skippable = bytes.size() >= 4 && (bytes[0] & 0xf0) == 0x50 && bytes.substr(1, 3) == "\x2a\x4d\x18";
  return bytes.starts_with("\x28\xb5\x2f\xfd") || skippable;
}
}  // namespace

// A decompressor. step() consumes bytes of `in` and fills `out` as far as possible, and shortens both spans
// accordingly.
class TextInput::Unpacker {
 public:
  virtual ~Unpacker() = default;
  virtual void step(std::string_view& in, std::span<char>& out) = 0;
  virtual bool between() const = 0;  // whether no member or frame is open, so that the file may end here
};

class TextInput::Gzip final : public Unpacker {
 public:
  explicit Gzip(const TextInput& owner) : owner_(owner) {
    constexpr int kGzipHeaders = 15 + 16;
    TRIAD_CHECK(inflateInit2(&stream_, kGzipHeaders) == Z_OK, "{}: zlib has no memory", owner.name());
  }
  ~Gzip() override { inflateEnd(&stream_); }
  void step(std::string_view& in, std::span<char>& out) override {
    if (ended_ && !begins_member(in)) return;
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(in.data()));
    stream_.avail_in = static_cast<uInt>(in.size());
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(std::min<size_t>(out.size(), size_t{1} << 30));
    const uInt room = stream_.avail_out;
    const int status = inflate(&stream_, Z_NO_FLUSH);
    in.remove_prefix(in.size() - stream_.avail_in);
    out = out.subspan(room - stream_.avail_out);
    if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR)
      fail("{}: damaged gzip data near offset {}: {}", owner_.name(),
           owner_.bytes_taken() - static_cast<int64_t>(in.size()), stream_.msg ? stream_.msg : zError(status));
    ended_ = status == Z_STREAM_END;
  }
  bool between() const override { return ended_; }

 private:
  // Whether another gzip member begins after the last one. Zeros up to the file's end may follow instead, which tapes
  // and tar use as padding. Throws for anything else.
  bool begins_member(std::string_view& in) {
    const size_t zeros = std::min(in.find_first_not_of('\0'), in.size());
    zeros_ += static_cast<int64_t>(zeros);
    in.remove_prefix(zeros);
    if (in.empty()) return false;
    const int64_t offset = owner_.bytes_taken() - static_cast<int64_t>(in.size());
    if (zeros_ > 0)
      fail("{}: its gzip data and {} bytes of zeros behind it are followed by something else, at offset {}",
           owner_.name(), zeros_, offset);
    if (in[0] != '\x1f') fail("{}: its gzip data is followed by something else, at offset {}", owner_.name(), offset);
    inflateReset(&stream_);
    return true;
  }

  const TextInput& owner_;
  z_stream stream_{};
  bool ended_ = false;
  int64_t zeros_ = 0;  // zero bytes after the last member
};

class TextInput::Zstd final : public Unpacker {
 public:
  explicit Zstd(const TextInput& owner) : owner_(owner), stream_(ZSTD_createDStream(), ZSTD_freeDStream) {
    TRIAD_CHECK(stream_ != nullptr, "{}: zstd has no memory", owner.name());
    // Accepts `zstd --long` files, whose windows exceed the default limit.
    ZSTD_DCtx_setParameter(stream_.get(), ZSTD_d_windowLogMax, ZSTD_dParam_getBounds(ZSTD_d_windowLogMax).upperBound);
  }
  void step(std::string_view& in, std::span<char>& out) override {
    ZSTD_inBuffer from{in.data(), in.size(), 0};
    ZSTD_outBuffer to{out.data(), out.size(), 0};
    const size_t status = ZSTD_decompressStream(stream_.get(), &to, &from);
    in.remove_prefix(from.pos);
    out = out.subspan(to.pos);
    if (ZSTD_isError(status) != 0)
      fail("{}: damaged zstd data near offset {}: {}", owner_.name(),
           owner_.bytes_taken() - static_cast<int64_t>(in.size()), ZSTD_getErrorName(status));
    between_ = status == 0;
  }
  bool between() const override { return between_; }

 private:
  const TextInput& owner_;
  std::unique_ptr<ZSTD_DStream, decltype(&ZSTD_freeDStream)> stream_;
  bool between_ = true;
};

bool is_stream(const std::string& path) {
  std::error_code error;
  return path == kStandardInput || !std::filesystem::is_regular_file(path, error);
}

void refuse_streams(std::span<const std::string> files) {
  for (const std::string& file : files)
    if (is_stream(file))
      fail(
          "{}: is a pipe or a device, and data are read more than once: store them in a file, or make token shards of "
          "them (`triad data --input -`)",
          file);
}

TextInput::TextInput(const std::string& path, std::function<bool()> stopped)
    : path_(path), name_(path == kStandardInput ? "standard input" : path), stopped_(std::move(stopped)) {
  file_ = FileHandle(path == kStandardInput ? ::dup(STDIN_FILENO) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file_.get() < 0) fail("{}: cannot be opened: {}", name_, std::strerror(errno));
  refill();
  if (begins_gzip(buffer_)) unpacker_ = std::make_unique<Gzip>(*this);
  if (begins_zstd(buffer_)) unpacker_ = std::make_unique<Zstd>(*this);
  if (unpacker_ && (begins_gzip(look(kFormatBytes)) || begins_zstd(look(kFormatBytes))))
    fail("{}: was compressed twice: unpack it once", name_);
  if (const std::string_view packed = packed_format(look(kFormatBytes)); !packed.empty())
    fail("{}: is {}, no text: plain, gzip and zstd are read", name_, packed);
}

TextInput::~TextInput() = default;

bool TextInput::refill() {
  buffer_.resize(kBufferBytes);
  at_ = 0;
  size_t have = 0;
  while (have < 4) {  // a pipe's first read may return fewer bytes than a magic number has
    constexpr int kPollMs = 100;
    pollfd ready{file_.get(), POLLIN, 0};
    while (stopped_ && ::poll(&ready, 1, kPollMs) == 0)
      if (stopped_()) return false;
    const ssize_t n = ::read(file_.get(), buffer_.data() + have, buffer_.size() - have);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("{}: cannot be read at offset {}: {}", name_, taken_, std::strerror(errno));
    if (n == 0) break;
    have += static_cast<size_t>(n);
    taken_ += n;
  }
  buffer_.resize(have);
  return have > 0;
}

size_t TextInput::read(std::span<char> to) {
  const size_t from_ahead = std::min(ahead_.size(), to.size());
  std::memcpy(to.data(), ahead_.data(), from_ahead);
  ahead_.erase(0, from_ahead);
  return from_ahead + unpack(to.subspan(from_ahead));
}

std::string_view TextInput::look(size_t bytes) {
  if (const size_t have = ahead_.size(); have < bytes) {
    ahead_.resize(bytes);
    ahead_.resize(have + unpack(std::span(ahead_).subspan(have)));
  }
  return std::string_view(ahead_).substr(0, bytes);
}

size_t TextInput::unpack(std::span<char> to) {
  const size_t wanted = to.size();
  while (!to.empty()) {
    if (at_ == buffer_.size() && !refill()) {
      // The file has ended, but zstd may still hold decompressed bytes that need no more input.
      std::string_view none;
      const size_t before = to.size();
      if (unpacker_ && !unpacker_->between()) unpacker_->step(none, to);
      if (to.size() < before) continue;
      TRIAD_CHECK(!unpacker_ || unpacker_->between(), "{}: is cut: the packed data goes on behind its end at offset {}",
                  name_, taken_);
      break;
    }
    std::string_view rest = std::string_view(buffer_).substr(at_);
    if (unpacker_) {
      unpacker_->step(rest, to);
    } else {
      const size_t n = std::min(rest.size(), to.size());
      std::memcpy(to.data(), rest.data(), n);
      rest.remove_prefix(n);
      to = to.subspan(n);
    }
    at_ = buffer_.size() - rest.size();
  }
  return wanted - to.size();
}

std::string read_whole_text(const std::string& path) {
  TextInput input(path);
  return read_to_end(input);
}

std::string read_to_end(TextInput& input) {
  constexpr size_t kAtATime = 1 << 16;
  std::string text, piece(kAtATime, '\0');
  while (const size_t n = input.read(piece)) text.append(piece, 0, n);
  return text;
}

}  // namespace triad
