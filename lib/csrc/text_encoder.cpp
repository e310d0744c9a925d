#include "text_encoder.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

#include "text.hpp"

namespace tokamake {

namespace {

// Key of a word of 1 to 15 bytes. Bytes after the word may be read, up to `end`.
inline WordCache::Key key_of(const char* word, size_t size, const char* end) {
  std::array<char, 16> copy{};
  if (end - word < 16) {
    std::memcpy(copy.data(), word, size);
    word = copy.data();
  }
  const uint64_t mark = uint64_t{size} << 56;
  const uint64_t first = load_bytes(word), rest = load_bytes(word + 8);
  if (size <= 8) return {first & ~uint64_t{0} >> (64 - 8 * size), mark};
  return {first, (rest & ~uint64_t{0} >> (128 - 8 * size)) | mark};
}

// White space of Unicode.
bool is_white(uint32_t c) { return is_space(c) && (c < 0x1C || c > 0x1F); }

// Size of the white space with which a text begins.
size_t spaces_before(std::string_view text) {
  const char* const end = text.data() + text.size();
  const char* at = text.data();
  for (const char* next = at; at < end && is_white(next_code_point(next));) at = next;
  return static_cast<size_t>(at - text.data());
}

// Size of a text without the white space with which it ends.
size_t without_spaces_after(std::string_view text) {
  size_t size = text.size();
  while (size > 0) {
    size_t last = size - 1;
    while ((text[last] & 0xC0) == 0x80) --last;
    const char* at = text.data() + last;
    if (!is_white(next_code_point(at))) break;
    size = last;
  }
  return size;
}

}  // namespace

AddedTexts::AddedTexts(const std::vector<Added>& added, std::vector<uint8_t> letters)
    : texts_(added.size()), sizes_(1 << 16), letters_(std::move(letters)) {
  for (const Added& token : added) {
    if (token.text.empty()) throw std::invalid_argument("an added text is not empty");
    if (texts_.find(token.text) != nullptr) continue;
    if (token.flags & kAlone && letters_.size() != 0x110000)
      throw std::invalid_argument("there is a letter for each of 0x110000 code points");
    texts_.add(token.text, {token.id, token.flags});
    const auto byte = [&](size_t i) { return size_t{static_cast<uint8_t>(token.text[i])}; };
    if (beginnings_.find(token.text[0]) == std::string::npos) beginnings_ += token.text[0];
    const bool is_one = token.text.size() == 1;
    for (size_t second = is_one ? 0 : byte(1); second <= (is_one ? 255 : byte(1)); ++second) {
      auto& sizes = sizes_[byte(0) << 8 | second];
      const auto place =
          std::lower_bound(sizes.begin(), sizes.end(), token.text.size(), std::greater<>());
      if (place == sizes.end() || *place != token.text.size())
        sizes.insert(place, token.text.size());
    }
  }
}

size_t AddedTexts::at(std::string_view text, uint32_t& id, uint32_t& flags) const {
  const auto byte = [&](size_t i) { return size_t{static_cast<uint8_t>(text[i])}; };
  for (const size_t size : sizes_[byte(0) << 8 | (text.size() > 1 ? byte(1) : 0)]) {
    if (size > text.size()) continue;
    if (const auto* const found = texts_.find(text.substr(0, size))) {
      id = texts_.ids(*found)[0];
      flags = texts_.ids(*found)[1];
      return size;
    }
  }
  return 0;
}

bool AddedTexts::is_word(std::string_view text, size_t begin, size_t end) const {
  size_t before = begin;
  while (before > 0 && (text[--before] & 0xC0) == 0x80) {
  }
  return (begin == 0 || !is_letter(&text[before])) &&
         (end == text.size() || !is_letter(&text[end]));
}

template <typename Found, typename Between>
void AddedTexts::split(std::string_view text, const Found& found, const Between& between) const {
  size_t begin = 0;  // end of the last added text
  const auto next = [&](char beginning, size_t from) { return text.find(beginning, from); };
  std::vector<size_t> places(beginnings_.size());  // next occurrence of each beginning
  for (size_t i = 0; i < places.size(); ++i) places[i] = next(beginnings_[i], 0);
  while (true) {
    const auto nearest = std::min_element(places.begin(), places.end());
    if (nearest == places.end() || *nearest == std::string_view::npos) break;
    const size_t place = *nearest;
    size_t from = place + 1;
    uint32_t id = 0, flags = 0;
    const size_t size = at(text.substr(place), id, flags);
    if (flags & kAlone && !is_word(text, place, place + size)) {
      from = place + size;
    } else if (size > 0) {
      const std::string_view before = text.substr(begin, place - begin);
      const size_t left = flags & kBefore ? without_spaces_after(before) : before.size();
      if (left > 0) between(before.substr(0, left));
      found(id);
      begin = place + size;
      if (flags & kAfter) begin += spaces_before(text.substr(begin));
      from = begin;
    }
    for (size_t i = 0; i < places.size(); ++i)
      if (places[i] < from) places[i] = next(beginnings_[i], from);
  }
  if (begin < text.size()) between(text.substr(begin));
}

TextEncoder::TextEncoder(std::shared_ptr<const WordModel> model, Rules rules)
    : model_(std::move(model)), rules_(std::move(rules)) {
  if (model_ == nullptr) throw std::invalid_argument("there is a model");
  if (rules_.normalizes_words && !rules_.later.empty())
    throw std::invalid_argument("texts cannot be found in normalized text if words are normalized");
}

size_t TextEncoder::room_for(const std::vector<std::string_view>& texts) const {
  size_t bytes = 0;
  for (const auto text : texts) bytes = sum_of(bytes, rules_.normalizer.room_for(text));
  if (rules_.prefix != Prefix::kNever) {
    const bool is_one = rules_.added.empty() && rules_.later.empty();
    bytes = sum_of(bytes, product_of(3, is_one ? texts.size() : bytes));  // bytes of U+2581
  }
  return sum_of(product_of(model_->tokens_per_byte(), bytes), WordCache::kFew);
}

size_t TextEncoder::encode(const std::vector<std::string_view>& texts, uint32_t* ids, size_t room,
                           int64_t* lengths) {
  if (room < WordCache::kFew) throw std::invalid_argument("there is room for a few tokens");
  uint32_t* at = ids;
  end_ = ids + room - WordCache::kFew;
  batch_.size = 0;  // an earlier call may have thrown
  for (const auto text : texts) {
    uint32_t* const after = encode_text(text, at);
    *lengths++ = after - at;
    at = after;
  }
  return static_cast<size_t>(at - ids);
}

uint32_t* TextEncoder::encode_text(std::string_view text, uint32_t* ids) {
  is_first_ = true;
  if (rules_.prefix == Prefix::kDocument && !text.empty()) {
    prefixed_.assign(1, ' ').append(text);
    text = prefixed_;
  }
  rules_.added.split(
      text,
      [&](uint32_t id) {
        ids = copy_tokens(&id, 1, ids, end_);
        is_first_ = false;
      },
      [&](std::string_view between) { ids = encode_normalized(between, ids); });
  return ids;
}

uint32_t* TextEncoder::encode_normalized(std::string_view text, uint32_t* ids) {
  if (rules_.strips_left) text.remove_prefix(spaces_before(text));
  if (rules_.strips_right) text = text.substr(0, without_spaces_after(text));
  if (!rules_.normalizes_words) text = rules_.normalizer.normalize(text);
  if (rules_.strips_normalized) text = text.substr(0, without_spaces_after(text));
  rules_.later.split(
      text,
      [&](uint32_t id) {
        ids = copy_tokens(&id, 1, ids, end_);
        is_first_ = false;
      },
      [&](std::string_view between) { ids = encode_between(between, ids); });
  return ids;
}

uint32_t* TextEncoder::encode_between(std::string_view text, uint32_t* ids) {
  const bool prefixed = has_prefix(text);
  is_first_ = false;
  if (prefixed) {
    prefixed_.assign(1, ' ').append(text);
    text = prefixed_;
  }
  const char* const end = text.data() + text.size();
  const auto flush = [&] { ids = encode_batch(end, ids); };
  rules_.words.split(text, batch_, flush);
  flush();
  return ids;
}

bool TextEncoder::has_prefix(std::string_view text) const {
  const bool is_marked = text[0] == ' ' || text.substr(0, 3) == "\u2581";
  switch (rules_.prefix) {
    case Prefix::kNever:
    case Prefix::kDocument:
      return false;
    case Prefix::kUnlessSpace:
      return text[0] != ' ';
    case Prefix::kAlways:
      return true;
    case Prefix::kUnlessMark:
      return !is_marked;
    case Prefix::kFirstUnlessMark:
      return is_first_ && !is_marked;
  }
  return false;
}

uint32_t* TextEncoder::encode_batch(const char* end, uint32_t* ids) {
  for (size_t i = 0; i < batch_.size; ++i) {
    const auto [word, word_end] = batch_.words[i];
    const auto size = static_cast<size_t>(word_end - word);
    if (size > WordCache::kShort) continue;
    places_[i].key = key_of(word, size, end);
    places_[i].line = &cache_.line_of(places_[i].key);
    __builtin_prefetch(places_[i].line);
  }
  for (size_t i = 0; i < batch_.size; ++i) {
    const auto [word, word_end] = batch_.words[i];
    const auto size = static_cast<size_t>(word_end - word);
    uint32_t* after = size <= WordCache::kShort
                          ? cache_.write(places_[i].key, *places_[i].line, ids, end_)
                          : nullptr;
    ids = after == nullptr ? encode_word(i, ids) : after;
    if (ids > end_) throw std::length_error("there are too many tokens");
  }
  batch_.size = 0;
  return ids;
}

uint32_t* TextEncoder::encode_word(size_t i, uint32_t* ids) {
  const auto [begin, end] = batch_.words[i];
  const std::string_view word(begin, static_cast<size_t>(end - begin));
  uint32_t* after = cache_.write(word, ids, end_);
  if (after == nullptr) {
    bool is_known = true;
    model_->encode(
        rules_.normalizes_words ? rules_.normalizer.normalize_word(word, is_known) : word,
        word_ids_);
    after = copy_tokens(word_ids_.data(), word_ids_.size(), ids, end_);
    if (!is_known) return after;  // these tokens are wrong
    cache_.add(word, word_ids_);
  }
  if (word.size() <= WordCache::kShort) cache_.recall(word, places_[i].key, *places_[i].line);
  return after;
}

}  // namespace tokamake
