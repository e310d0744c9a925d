#include "vocabulary.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "json_lines.hpp"
#include "text.hpp"

namespace tokamake {

namespace {

constexpr std::string_view kMark = "\u2581";

// Walks through valid JSON. Commas and colons count as white space.
class Walker {
 public:
  explicit Walker(std::string_view json) : at_(json.data()), end_(json.data() + json.size()) {}

  const char* at() const { return at_; }

  // Character that comes next, after white space; 0 at the end.
  char next() {
    while (at_ != end_ && is_white(*at_)) ++at_;
    return at_ == end_ ? '\0' : *at_;
  }

  // Reads a character if it comes next.
  bool take(char character) {
    const bool is_next = next() == character && at_ != end_;
    at_ += is_next;
    return is_next;
  }

  // Text of a string, valid until the next call with the same buffer.
  std::string_view string(std::string& buffer) {
    std::string_view text;
    next();
    if (!read_string(at_, end_, buffer, text))
      throw std::invalid_argument("a string of its definition is not valid");
    return text;
  }

  uint32_t number() {
    uint64_t number = 0;
    next();
    const char* const begin = at_;
    for (; at_ != end_ && *at_ >= '0' && *at_ <= '9' && number <= kMaxId; ++at_)
      number = 10 * number + static_cast<uint64_t>(*at_ - '0');
    if (at_ == begin || number > kMaxId)
      throw std::invalid_argument("an id of its definition is not valid");
    return static_cast<uint32_t>(number);
  }

  // Skips a value.
  void skip() {
    int depth = 0;
    do {
      const char character = next();
      if (at_ == end_) return;
      ++at_;
      if (character == '"') {
        for (; at_ != end_ && *at_ != '"'; ++at_) at_ += *at_ == '\\' && end_ - at_ > 1;
        at_ += at_ != end_;
      } else if (character == '{' || character == '[') {
        ++depth;
      } else if (character == '}' || character == ']') {
        --depth;
      } else {  // a number or a name
        while (at_ != end_ && !is_white(*at_) && *at_ != '}' && *at_ != ']') ++at_;
      }
    } while (depth > 0);
  }

  // Calls `member` with each key of an object. It reads or skips the value.
  template <typename Member>
  void object(const Member& member) {
    std::string buffer;
    if (!take('{')) throw std::invalid_argument("its definition has no object where one belongs");
    while (next() == '"') member(string(buffer));
    take('}');
  }

 private:
  static constexpr uint64_t kMaxId = std::numeric_limits<uint32_t>::max();

  static bool is_white(char c) {
    return c == ' ' || c == ',' || c == ':' || c == '\n' || c == '\r' || c == '\t';
  }

  const char *at_, *end_;
};

// Calls `pair` with both sides of each merge.
template <typename Pair>
void each_merge(std::string_view merges, const Pair& pair) {
  Walker walker(merges);
  std::string first, second;
  if (!walker.take('[')) throw std::invalid_argument("its merges are no array");
  while (!walker.take(']')) {
    if (walker.take('[')) {
      const std::string_view left = walker.string(first);
      pair(left, walker.string(second));
      if (!walker.take(']')) throw std::invalid_argument("a merge has not two sides");
    } else {
      const std::string_view both = walker.string(first);
      const size_t space = both.find(' ');
      if (space == std::string_view::npos || both.find(' ', space + 1) != std::string_view::npos)
        throw std::invalid_argument("a merge has not two sides");
      pair(both.substr(0, space), both.substr(space + 1));
    }
  }
}

}  // namespace

bool find_model(std::string_view definition, ModelSpans& found) try {
  Walker walker(definition);
  const auto place = [&] { return static_cast<size_t>(walker.at() - definition.data()); };
  bool has_vocab = false, has_merges = false;
  if (walker.next() != '{') return false;
  walker.object([&](std::string_view key) {
    if (key != "model" || walker.next() != '{') return walker.skip();
    walker.object([&](std::string_view name) {
      const char opening = walker.next();
      const size_t begin = place();
      if (name == "vocab" && opening == '{') {
        has_vocab = true;
        walker.object(
            [&](std::string_view) { found.highest = std::max(found.highest, walker.number()); });
        found.vocab = {begin, place()};
        return;
      }
      walker.skip();
      if (name != "merges" || opening != '[') return;
      has_merges = true;
      found.merges = {begin, place()};
    });
  });
  return has_vocab && has_merges;
} catch (const std::invalid_argument&) {
  return false;
}

Vocabulary::Vocabulary(std::string_view vocab, std::string_view merges)
    : ids_(0), joints_(1 << 16) {
  Walker walker(vocab);
  walker.object([&](std::string_view text) {
    words_.emplace_back(text, 0);
    words_.back().second = walker.number();
  });
  ids_ = WordTable(words_.size());
  for (const auto& [text, id] : words_) ids_.add(text, {id});
  const auto known = [&](std::string_view text) {
    const uint32_t* const found = id(text);
    if (found == nullptr) throw std::invalid_argument("a merge is not in its vocabulary");
    return *found;
  };
  for (size_t before = 0; before < 256; ++before)
    std::fill_n(joints_.begin() + static_cast<std::ptrdiff_t>(before << 8 | 0x80), 0x40, 1);
  std::string merged;
  each_merge(merges, [&](std::string_view left, std::string_view right) {
    merged.assign(left).append(right);
    merges_.push_back({known(left), known(right), known(merged)});
    add_joints(merged);
  });
}

const uint32_t* Vocabulary::id(std::string_view text) const {
  const auto* const found = ids_.find(text);
  return found == nullptr ? nullptr : ids_.ids(*found);
}

Vocabulary::Ids Vocabulary::characters() const {
  Ids found;
  for (const auto& word : words_) {
    const char* at = word.first.data();
    if (word.first.empty()) continue;
    next_code_point(at);
    if (at == word.first.data() + word.first.size()) found.push_back(word);
  }
  return found;
}

Vocabulary::Ids Vocabulary::byte_words(const std::vector<uint32_t>& alphabet) const {
  std::vector<int> bytes(1 << 10, -1);
  for (size_t byte = 0; byte < alphabet.size(); ++byte)
    bytes.at(alphabet[byte]) = static_cast<int>(byte);
  Ids found;
  for (const auto& [text, id] : words_) {
    std::string word;
    const char* const end = text.data() + text.size();
    const char* at = text.data();
    while (at < end) {
      const uint32_t character = next_code_point(at);
      const int byte = character < bytes.size() ? bytes[character] : -1;
      if (byte < 0) break;
      word += static_cast<char>(byte);
      if (at == end) found.emplace_back(word, id);
    }
  }
  return found;
}

void Vocabulary::add_joints(std::string_view merged) {
  const auto join = [&](char before, char after) {
    joints_[size_t{static_cast<uint8_t>(before)} << 8 | static_cast<uint8_t>(after)] = 1;
  };
  const char* const end = merged.data() + merged.size();
  const char* begin = merged.data();
  for (const char* at = begin; next_code_point(at), at < end; begin = at) {
    const bool after_space = std::string_view(begin, static_cast<size_t>(at - begin)) == kMark;
    const bool before_space =
        std::string_view(at, static_cast<size_t>(end - at)).substr(0, kMark.size()) == kMark;
    join(at[-1], *at);
    if (after_space) join(' ', *at);
    if (before_space) join(at[-1], ' ');
    if (after_space && before_space) join(' ', ' ');
  }
}

}  // namespace tokamake
