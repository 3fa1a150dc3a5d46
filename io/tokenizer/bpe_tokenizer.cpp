#include "io/tokenizer/bpe_tokenizer.h"

#include <algorithm>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"

namespace triad {

namespace {

std::vector<AddedToken> added_tokens(const BpeSpec& spec, bool normalized) {
  std::vector<AddedToken> tokens;
  for (AddedToken token : spec.added) {
    if (token.normalized != normalized) continue;
    if (normalized)
      for (const NormalForm form : spec.normalizers) token.content = normalize(form, token.content);
    tokens.push_back(std::move(token));
  }
  return tokens;
}

}  // namespace

// The buffers that one call needs while it encodes.
struct BpeTokenizer::Workspace {
  explicit Workspace(const std::vector<Step>& steps) {
    for (const Step& step : steps) {
      auto& matcher = matchers.emplace_back();
      if (step.pattern) matcher.emplace(*step.pattern);
    }
  }
  BpeScratch bpe;
  std::vector<std::optional<Pattern::Matcher>> matchers;  // one per pre-tokenizer step
};

class BpeTokenizer::Lease {
 public:
  explicit Lease(const BpeTokenizer& owner) : owner_(owner) {
    {
      const std::lock_guard lock(owner.mutex_);
      if (!owner.idle_.empty()) {
        workspace_ = std::move(owner.idle_.back());
        owner.idle_.pop_back();
      }
    }
    if (!workspace_) workspace_ = std::make_unique<Workspace>(owner.steps_);
  }
  ~Lease() {
    const std::lock_guard lock(owner_.mutex_);
    owner_.idle_.push_back(std::move(workspace_));
  }
  Lease(const Lease&) = delete;
  Workspace& operator*() const { return *workspace_; }

 private:
  const BpeTokenizer& owner_;
  std::unique_ptr<Workspace> workspace_;
};

BpeTokenizer::BpeTokenizer(BpeSpec spec, const TokenizerOptions& options)
    : spec_(std::move(spec)),
      options_(options),
      bpe_(spec_.byte_tokens, spec_.merges, std::move(spec_.whole_words)),
      raw_(added_tokens(spec_, false)),
      normalized_(added_tokens(spec_, true)) {
  for (const BpeSpec::Split& s : spec_.splits) {
    Step& step = steps_.emplace_back(Step{std::nullopt, s.behavior, s.invert});
    if (!s.prefix_space) step.pattern.emplace(s.pattern, spec_.name);
  }
  // True if a text's beginning can be encoded before the rest is known: no normalizer and no added token may depend on
  // text beyond the cut.
  has_final_prefixes_ = spec_.normalizers.empty() && !raw_.depends_on_context() && !normalized_.depends_on_context() &&
                        splits_prefixes(0);
}

BpeTokenizer::~BpeTokenizer() = default;

bool BpeTokenizer::splits_prefixes(size_t step) const {
  return step < steps_.size() && steps_[step].pattern && !steps_[step].pattern->looks_behind() &&
         steps_[step].behavior == SplitBehavior::isolated;
}

void BpeTokenizer::append(std::string_view text, std::vector<int32_t>& out) const {
  const Lease workspace(*this);
  while (!text.empty()) {
    const size_t valid = utf8_prefix(text);
    if (valid > 0) encode_utf8(text.substr(0, valid), false, *workspace, out);
    text.remove_prefix(valid);
    const size_t invalid = invalid_prefix(text);
    if (invalid > 0) bpe_.encode(text.substr(0, invalid), (*workspace).bpe, out);
    text.remove_prefix(invalid);
  }
}

size_t BpeTokenizer::append_prefix(std::string_view text, std::vector<int32_t>& out) const {
  if (!has_final_prefixes_) return 0;
  const Lease workspace(*this);
  size_t done = 0;
  while (true) {
    const std::string_view rest = text.substr(done);
    const size_t valid = utf8_prefix(rest);
    if (valid == rest.size() || is_cut_character(rest.substr(valid)))
      return done + encode_utf8(rest.substr(0, valid), true, *workspace, out);
    const size_t end = valid + invalid_prefix(rest.substr(valid));
    if (end + 4 > rest.size()) return done + encode_utf8(rest.substr(0, valid), true, *workspace, out);
    if (valid > 0) encode_utf8(rest.substr(0, valid), false, *workspace, out);
    bpe_.encode(rest.substr(valid, end - valid), (*workspace).bpe, out);
    done += end;
  }
}

// Appends the added tokens that occur in the text, and calls section(text between them, more_follows) for the text
// between them, in order; `section` returns how many bytes it encoded. more_follows: more text follows after `text`.
// Returns how many bytes were encoded: all of them unless more_follows.
template <class Section>
size_t BpeTokenizer::cut_out(const AddedTokens& tokens, std::string_view text, bool more_follows,
                             std::vector<int32_t>& out, Section&& section) const {
  // Where the bytes end in which an added token is searched. If more text follows, a token that begins in the last
  // bytes may be incomplete.
  size_t limit = text.size();
  if (more_follows && !tokens.empty()) limit -= std::min(limit, tokens.longest() - 1);
  while (more_follows && limit > 0 && limit < text.size() && (static_cast<uint8_t>(text[limit]) & 0xc0) == 0x80)
    --limit;
  size_t taken = 0, from = 0;
  while (const auto match = tokens.find(text, from, taken, limit, options_.special_as_text)) {
    if (match->begin > taken) section(text.substr(taken, match->begin - taken), false);
    out.push_back(match->id);
    taken = match->end;
    from = match->searched;
  }
  return taken < limit ? taken + section(text.substr(taken, limit - taken), more_follows) : taken;
}

size_t BpeTokenizer::encode_utf8(std::string_view text, bool more_follows, Workspace& workspace,
                                 std::vector<int32_t>& out) const {
  return cut_out(raw_, text, more_follows, out, [&](std::string_view plain, bool open) {
    std::string normal;
    if (!spec_.normalizers.empty()) {
      normal = plain;
      for (const NormalForm form : spec_.normalizers) normal = normalize(form, normal);
      plain = normal;
    }
    return cut_out(normalized_, plain, open, out, [&](std::string_view section, bool more_follows_here) {
      return split(0, section, more_follows_here, workspace, out);
    });
  });
}

size_t BpeTokenizer::split(size_t step, std::string_view text, bool more_follows, Workspace& workspace,
                           std::vector<int32_t>& out) const {
  if (step == steps_.size()) {
    bpe_.encode(text, workspace.bpe, out);
    return text.size();
  }
  const Step& s = steps_[step];
  if (!s.pattern) {
    split(step + 1, text[0] == ' ' ? std::string(text) : " " + std::string(text), false, workspace, out);
    return text.size();
  }
  if (s.behavior != SplitBehavior::isolated) {
    split_otherwise(step, text, workspace, out);
    return text.size();
  }
  const auto cut = [&](size_t begin, size_t end) {
    if (begin < end) split(step + 1, text.substr(begin, end - begin), false, workspace, out);
  };
  size_t done = 0, from = 0, gap_end = text.size();
  Pattern::Span match;
  while (from < text.size()) {
    const Pattern::Found found = s.pattern->find(*workspace.matchers[step], text, from, more_follows, match);
    if (found == Pattern::Found::cut) gap_end = match.begin;
    if (found != Pattern::Found::match) break;
    cut(done, match.begin);
    cut(match.begin, match.end);
    done = from = match.end;
    if (match.begin == match.end && from < text.size()) from += character_bytes(text, from);
  }
  if (more_follows) {  // the next step may be able to encode a prefix after the last match
    if (!splits_prefixes(step + 1)) return done;
    return done + split(step + 1, text.substr(done, gap_end - done), true, workspace, out);
  }
  cut(done, text.size());
  return text.size();
}

// Splits a text with the behaviors that depend on neighbouring parts: lists the matches and the text between them, then
// joins neighbours.
void BpeTokenizer::split_otherwise(size_t step, std::string_view text, Workspace& workspace,
                                   std::vector<int32_t>& out) const {
  const Step& s = steps_[step];
  struct Part {
    size_t begin, end;
    bool match;
  };
  std::vector<Part> parts;
  size_t done = 0, from = 0;
  Pattern::Span match;
  while (from <= text.size() &&
         s.pattern->find(*workspace.matchers[step], text, from, false, match) == Pattern::Found::match) {
    if (done < match.begin) parts.push_back({done, match.begin, s.invert});
    parts.push_back({match.begin, match.end, !s.invert});
    done = from = match.end;
    if (match.begin == match.end) {
      if (from == text.size()) break;
      from += character_bytes(text, from);
    }
  }
  if (done < text.size()) parts.push_back({done, text.size(), s.invert});

  std::vector<Part> joined;
  if (s.behavior == SplitBehavior::merged_with_next) {
    for (size_t i = 0; i < parts.size(); ++i) {  // joins each match with the text after it
      const bool join = i > 0 && parts[i - 1].match && !parts[i].match;
      if (join)
        joined.back().end = parts[i].end;
      else
        joined.push_back(parts[i]);
    }
  } else {
    for (size_t i = 0; i < parts.size(); ++i) {
      const bool previous = i > 0 && parts[i - 1].match;
      bool join = false;
      if (s.behavior == SplitBehavior::contiguous) join = i > 0 && parts[i].match == previous;
      if (s.behavior == SplitBehavior::merged_with_previous) join = i > 0 && parts[i].match && !previous;
      if (s.behavior == SplitBehavior::removed && parts[i].match) continue;
      if (join)
        joined.back().end = parts[i].end;
      else
        joined.push_back(parts[i]);
    }
  }
  for (const Part& part : joined)
    if (part.begin < part.end) split(step + 1, text.substr(part.begin, part.end - part.begin), false, workspace, out);
}

std::string BpeTokenizer::decode(std::span<const int32_t> tokens) const {
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    TRIAD_CHECK(has(tokens[i]), "token {} at position {} is none of the {} of {}", tokens[i], i, vocab_size(), name());
    text += *spec_.texts[static_cast<size_t>(tokens[i])];
  }
  return text;
}

}  // namespace triad
