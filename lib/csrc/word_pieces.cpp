#include "word_pieces.hpp"

#include <stdexcept>

#include "text.hpp"

namespace tokamake {

namespace {

WordPieces::Words after(std::string_view prefix, const WordPieces::Words& words) {
  WordPieces::Words found;
  for (const auto& [text, id] : words)
    if (text.compare(0, prefix.size(), prefix) == 0)
      found.emplace_back(text.substr(prefix.size()), id);
  return found;
}

}  // namespace

WordPieces::WordPieces(const Words& vocabulary, std::string_view prefix, uint32_t unknown,
                       size_t longest, std::vector<uint8_t> kinds)
    : beginnings_(vocabulary),
      continuations_(after(prefix, vocabulary)),
      unknown_(unknown),
      longest_(longest),
      kinds_(std::move(kinds)) {
  if (kinds_.size() != 0x110000)
    throw std::invalid_argument("there is a kind for each of 0x110000 code points");
}

void WordPieces::encode(std::string_view text, std::vector<uint32_t>& ids) const {
  ids.clear();
  const char* const end = text.data() + text.size();
  const char* word = text.data();
  size_t num_characters = 0;
  const auto end_word = [&](const char* here, const char* next) {
    if (num_characters > 0)
      encode_word({word, static_cast<size_t>(here - word)}, num_characters, ids);
    word = next;
    num_characters = 0;
  };
  for (const char* at = word; at < end;) {
    const char* const begin = at;
    const uint8_t kind = kinds_[next_code_point(at)];
    if (kind != 0) end_word(begin, kind == kSpace ? at : begin);
    num_characters += kind != kSpace;
    if (kind == kAlone) end_word(at, at);
  }
  end_word(end, end);
}

void WordPieces::encode_word(std::string_view word, size_t num_characters,
                             std::vector<uint32_t>& ids) const {
  const size_t before = ids.size();
  const Trie* pieces = &beginnings_;
  bool is_known = num_characters <= longest_;
  while (is_known && !word.empty()) {
    size_t longest = 0;
    uint32_t id = 0;
    pieces->each_beginning(word, [&](size_t size, uint32_t number) {
      if (number == 0) return;
      longest = size;
      id = number - 1;
    });
    is_known = longest > 0;
    word.remove_prefix(longest);
    ids.push_back(id);
    pieces = &continuations_;
  }
  if (is_known) return;
  ids.resize(before);
  ids.push_back(unknown_);
}

}  // namespace tokamake
