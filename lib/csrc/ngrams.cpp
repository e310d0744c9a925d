#include "ngrams.hpp"

#include <algorithm>
#include <deque>
#include <stdexcept>

#include "word_hashes.hpp"

namespace tokamake {

namespace {

constexpr uint64_t kFactor = 0xD6E8FEB86659FD93;  // odd, of the polynomial hash of words

uint64_t bits_of(uint64_t hash) {
  return uint64_t{1} << (hash & 63) | uint64_t{1} << (hash >> 6 & 63);
}

// Counts the code points before ascending bytes of a text, in one pass over it.
class CodePoints {
 public:
  explicit CodePoints(std::string_view text) : text_(text) {}

  int64_t before(size_t byte) {
    for (; byte_ < byte; ++byte_) count_ += (static_cast<uint8_t>(text_[byte_]) & 0xC0) != 0x80;
    return count_;
  }

 private:
  std::string_view text_;
  size_t byte_ = 0;
  int64_t count_ = 0;
};

// The first white space from `byte` on, or `limit`.
size_t next_space(std::string_view text, size_t byte, size_t limit) {
  const char* at = text.data() + byte;
  while (at < text.data() + limit) {
    const char* next = at;
    if (is_space(next_code_point(next))) break;
    at = next;
  }
  return static_cast<size_t>(at - text.data());
}

}  // namespace

WordSequence::WordSequence(std::vector<uint32_t> characters, size_t longest)
    : characters_(std::move(characters)), powers_(1, 1) {
  for (size_t i = 0; i < longest; ++i) powers_.push_back(powers_.back() * kFactor);
}

void WordSequence::read(std::string_view text) {
  words_.clear();
  sums_.assign(1, 0);
  hash_words(text, characters_, [&](uint64_t hash, const char* begin, const char* end) {
    words_.emplace_back(begin - text.data(), end - text.data());
    sums_.push_back(sums_.back() * kFactor + hash);
  });
}

uint64_t WordSequence::hash_of(size_t first, size_t size) const {
  const uint64_t hash = sums_[first + size] - sums_[first] * powers_[size];
  // The low bits of a product do not depend on its high bits.
  return (hash ^ hash >> 32) * kHashFactor + size;
}

NgramIndex::NgramIndex(std::vector<uint32_t> characters, size_t longest, size_t shortest)
    : text_(std::move(characters), longest), longest_(longest), shortest_(shortest) {
  if (shortest == 0 || shortest > longest)
    throw std::invalid_argument(
        "an n-gram must have words, and longest must not be below shortest");
}

bool NgramIndex::may_contain(uint64_t hash) const {
  const uint64_t bits = bits_of(hash);
  return (filter_[hash >> shift_] & bits) == bits;
}

bool NgramIndex::add(std::string_view text, uint32_t set) {
  text_.read(text);
  const size_t words = text_.words().size();
  if (words < shortest_) return false;
  const size_t size = std::min(longest_, words);
  for (size_t first = 0; first + size <= words; ++first)
    entries_.emplace_back(text_.hash_of(first, size), set);
  if (std::find(sizes_.begin(), sizes_.end(), size) == sizes_.end()) sizes_.push_back(size);
  return true;
}

void NgramIndex::finish() {
  std::sort(entries_.begin(), entries_.end());
  entries_.erase(std::unique(entries_.begin(), entries_.end()), entries_.end());
  entries_.shrink_to_fit();
  std::sort(sizes_.begin(), sizes_.end());
  // 16 to 32 bits for each entry.
  while (shift_ > 24 && (uint64_t{1} << (64 - shift_)) * 4 < entries_.size()) --shift_;
  filter_.assign(size_t{1} << (64 - shift_), 0);
  for (const auto& [hash, set] : entries_) filter_[hash >> shift_] |= bits_of(hash);
}

void NgramIndex::find_at(size_t first, size_t size, std::vector<NgramMatch>& matches) const {
  const uint64_t hash = text_.hash_of(first, size);
  if (!may_contain(hash)) return;
  auto entry = std::lower_bound(entries_.begin(), entries_.end(), std::make_pair(hash, 0u));
  for (; entry != entries_.end() && entry->first == hash; ++entry)
    matches.push_back({static_cast<int64_t>(first), static_cast<int64_t>(first + size), 0, 0,
                       static_cast<int64_t>(entry->second)});
}

size_t NgramIndex::find(std::string_view text, std::vector<NgramMatch>& matches) {
  if (filter_.empty()) throw std::logic_error("call finish before find");
  matches.clear();
  text_.read(text);
  const auto& words = text_.words();
  for (size_t first = 0; first < words.size(); ++first)
    for (const size_t size : sizes_)
      if (first + size <= words.size()) find_at(first, size, matches);
  if (matches.empty()) return words.size();
  // Words follow each other, so one pass over the text is enough.
  CodePoints code_points(text);
  std::vector<std::pair<int64_t, int64_t>> places;
  for (const auto& [begin, end] : words) {
    const int64_t first = code_points.before(begin);
    places.emplace_back(first, code_points.before(end));
  }
  for (NgramMatch& match : matches) {
    match.begin = places[match.first_word].first;
    match.end = places[match.end_word - 1].second;
  }
  return words.size();
}

WordWindows::WordWindows(std::vector<uint32_t> characters, size_t size, size_t group)
    : text_(std::move(characters), size), size_(size), group_(group) {
  if (size == 0 || group == 0) throw std::invalid_argument("n-grams and groups must not be empty");
}

void WordWindows::choose(std::string_view text, std::vector<WordWindow>& windows) {
  windows.clear();
  text_.read(text);
  const auto& words = text_.words();
  if (words.size() < size_ + group_ - 1) return;
  const size_t last = words.size() - size_;
  // Hashes that may be the smallest of a group that ends later: they ascend.
  std::deque<std::pair<uint64_t, size_t>> smallest;
  std::vector<std::pair<uint64_t, size_t>> chosen;
  chosen.emplace_back(text_.hash_of(0, size_), 0);
  for (size_t first = 0; first <= last; ++first) {
    const uint64_t hash = text_.hash_of(first, size_);
    while (!smallest.empty() && smallest.back().first >= hash) smallest.pop_back();
    smallest.emplace_back(hash, first);
    if (smallest.front().second + group_ <= first) smallest.pop_front();
    const bool is_whole = first + 1 >= group_;
    if (is_whole && smallest.front().second != chosen.back().second)
      chosen.push_back(smallest.front());
    if (first == last && chosen.back().second != last) chosen.emplace_back(hash, last);
  }
  CodePoints begins(text);
  CodePoints ends(text);
  for (const auto& [hash, first] : chosen) {
    const size_t after = first + size_;
    const size_t limit = after < words.size() ? words[after].first : text.size();
    const size_t end = next_space(text, words[after - 1].second, limit);
    windows.push_back({hash, begins.before(words[first].first), ends.before(end)});
  }
}

}  // namespace tokamake
