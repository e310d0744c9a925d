#include "byte_pairs.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

#include "text.hpp"

namespace tokamake {

namespace {

constexpr size_t kMaxClusters = 100'000;  // whose normalized text is known
constexpr size_t kGrowth = 11;            // of UTF-8 that is normalized by NFKC (Unicode, UAX 15)

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

Normalizer::Normalizer(std::vector<uint8_t> marks) : marks_(std::move(marks)) {
  if (marks_.empty()) return;
  if (marks_.size() != 0x110000)
    throw std::invalid_argument("there is a mark for each of 0x110000 code points");
  if (std::any_of(marks_.begin(), marks_.begin() + 0x80, [](uint8_t mark) { return mark; }))
    throw std::invalid_argument("ASCII is normalized");
}

template <typename Visit>
void Normalizer::clusters(std::string_view text, const Visit& visit) const {
  if (marks_.empty()) return;
  const char* const end = text.data() + text.size();
  const char* before = text.data();
  for (const char* at = before; at < end;) {
    if (static_cast<uint8_t>(*at) < 0x80) {
      before = at++;
      continue;
    }
    const char* const begin = at;
    if (!marks_[next_code_point(at)]) {
      before = begin;
      continue;
    }
    for (const char* next = at; at < end && marks_[next_code_point(next)];) at = next;
    visit(std::string_view(before, static_cast<size_t>(at - before)));
    before = at;  // if the text ends here, or before a character without marks
  }
}

std::string_view Normalizer::normalize(std::string_view text, std::string& buffer) {
  const char* copied = text.data();
  clusters(text, [&](std::string_view cluster) {
    if (copied == text.data()) buffer.clear();
    buffer.append(copied, cluster.data());
    copied = cluster.data() + cluster.size();
    const auto known = known_.find(key_.assign(cluster));
    if (known == known_.end())
      unknown_.insert(key_);
    else
      buffer.append(known->second);
  });
  if (copied == text.data()) return text;
  return buffer.append(copied, text.data() + text.size());
}

void Normalizer::learn(std::string cluster, std::string normalized) {
  known_.insert_or_assign(std::move(cluster), std::move(normalized));
}

size_t Normalizer::bytes_in_clusters(std::string_view text) const {
  size_t bytes = 0;
  clusters(text, [&](std::string_view cluster) { bytes += cluster.size(); });
  return bytes;
}

void Normalizer::begin() {
  unknown_.clear();
  if (known_.size() > kMaxClusters) known_.clear();
}

AddedTexts::AddedTexts(const std::vector<Added>& added) : texts_(added.size()), sizes_(1 << 16) {
  for (const Added& token : added) {
    if (token.text.empty()) throw std::invalid_argument("an added text is not empty");
    if (texts_.find(token.text) != nullptr) continue;
    texts_.add(token.text, {token.id, token.strips});
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

size_t AddedTexts::at(std::string_view text, uint32_t& id, uint32_t& strips) const {
  const auto byte = [&](size_t i) { return size_t{static_cast<uint8_t>(text[i])}; };
  for (const size_t size : sizes_[byte(0) << 8 | (text.size() > 1 ? byte(1) : 0)]) {
    if (size > text.size()) continue;
    if (const auto* const found = texts_.find(text.substr(0, size))) {
      id = texts_.ids(*found)[0];
      strips = texts_.ids(*found)[1];
      return size;
    }
  }
  return 0;
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
    uint32_t id = 0, strips = 0;
    if (const size_t size = at(text.substr(place), id, strips)) {
      const std::string_view before = text.substr(begin, place - begin);
      const size_t left = strips & kBefore ? without_spaces_after(before) : before.size();
      if (left > 0) between(before.substr(0, left));
      found(id);
      begin = place + size;
      if (strips & kAfter) begin += spaces_before(text.substr(begin));
      from = begin;
    }
    for (size_t i = 0; i < places.size(); ++i)
      if (places[i] < from) places[i] = next(beginnings_[i], from);
  }
  if (begin < text.size()) between(text.substr(begin));
}

BytePairs::BytePairs(PreTokenizer words, Merges merges, WordTable whole, AddedTexts added,
                     AddedTexts later, Normalizer normalizer, Prefix prefix)
    : words_(std::move(words)),
      merges_(std::move(merges)),
      whole_(std::move(whole)),
      added_(std::move(added)),
      later_(std::move(later)),
      normalizer_(std::move(normalizer)),
      prefix_(prefix) {}

size_t BytePairs::room_for(const std::vector<std::string_view>& texts) const {
  size_t bytes = WordCache::kFew;
  for (const auto text : texts)
    bytes += text.size() + kGrowth * normalizer_.bytes_in_clusters(text);
  if (prefix_ == Prefix::kNever) return bytes;
  const bool is_one = added_.empty() && later_.empty();
  return bytes + 3 * (is_one ? texts.size() : bytes);  // bytes of U+2581
}

size_t BytePairs::encode(const std::vector<std::string_view>& texts, uint32_t* ids,
                         int64_t* lengths) {
  uint32_t* at = ids;
  batch_.size = 0;  // an earlier call may have thrown
  for (const auto text : texts) {
    uint32_t* const after = encode_text(text, at);
    *lengths++ = after - at;
    at = after;
  }
  return static_cast<size_t>(at - ids);
}

uint32_t* BytePairs::encode_text(std::string_view text, uint32_t* ids) {
  is_first_ = true;
  added_.split(
      text,
      [&](uint32_t id) {
        *ids++ = id;
        is_first_ = false;
      },
      [&](std::string_view between) { ids = encode_normalized(between, ids); });
  return ids;
}

uint32_t* BytePairs::encode_normalized(std::string_view text, uint32_t* ids) {
  later_.split(
      normalizer_.normalize(text, normalized_),
      [&](uint32_t id) {
        *ids++ = id;
        is_first_ = false;
      },
      [&](std::string_view between) { ids = encode_between(between, ids); });
  return ids;
}

uint32_t* BytePairs::encode_between(std::string_view text, uint32_t* ids) {
  const bool prefixed = has_prefix(text);
  is_first_ = false;
  if (prefixed) {
    prefixed_.assign(1, ' ').append(text);
    text = prefixed_;
  }
  const char* const end = text.data() + text.size();
  const auto flush = [&] { ids = encode_batch(end, ids); };
  words_.split(text, batch_, flush);
  flush();
  return ids;
}

bool BytePairs::has_prefix(std::string_view text) const {
  const bool is_marked = text[0] == ' ' || text.substr(0, 3) == "\u2581";
  switch (prefix_) {
    case Prefix::kNever:
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

uint32_t* BytePairs::encode_batch(const char* end, uint32_t* ids) {
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
    uint32_t* after =
        size <= WordCache::kShort ? cache_.write(places_[i].key, *places_[i].line, ids) : nullptr;
    ids = after == nullptr ? encode_word(i, ids) : after;
  }
  batch_.size = 0;
  return ids;
}

uint32_t* BytePairs::encode_word(size_t i, uint32_t* ids) {
  const auto [begin, end] = batch_.words[i];
  const std::string_view word(begin, static_cast<size_t>(end - begin));
  uint32_t* after = cache_.write(word, ids);
  if (after == nullptr) {
    if (const auto* const whole = whole_.find(word))
      word_ids_.assign(1, *whole_.ids(*whole));
    else
      merges_.encode(word, word_ids_);
    cache_.add(word, word_ids_);
    after = std::copy(word_ids_.begin(), word_ids_.end(), ids);
  }
  if (word.size() <= WordCache::kShort) cache_.recall(word, places_[i].key, *places_[i].line);
  return after;
}

}  // namespace tokamake
