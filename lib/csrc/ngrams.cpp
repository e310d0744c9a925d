#include "ngrams.hpp"

#include <algorithm>
#include <stdexcept>

#include "word_hashes.hpp"

namespace tokamake {

namespace {

constexpr uint64_t kFactor = 0xD6E8FEB86659FD93;  // odd, of the polynomial hash of words

uint64_t bits_of(uint64_t hash) {
  return uint64_t{1} << (hash & 63) | uint64_t{1} << (hash >> 6 & 63);
}

// Replaces bytes by code points. Words follow each other, so one pass over the text is enough.
void count_code_points(std::string_view text, std::vector<std::pair<size_t, size_t>>& words) {
  size_t byte = 0;
  size_t code_point = 0;
  const auto advance = [&](size_t& position) {
    for (; byte < position; ++byte) code_point += (static_cast<uint8_t>(text[byte]) & 0xC0) != 0x80;
    position = code_point;
  };
  for (auto& [begin, end] : words) {
    advance(begin);
    advance(end);
  }
}

}  // namespace

NgramIndex::NgramIndex(std::vector<uint32_t> characters, size_t longest, size_t shortest)
    : characters_(std::move(characters)), longest_(longest), shortest_(shortest) {
  if (shortest == 0 || shortest > longest)
    throw std::invalid_argument(
        "an n-gram must have words, and longest must not be below shortest");
  powers_.push_back(1);
  for (size_t i = 0; i < longest; ++i) powers_.push_back(powers_.back() * kFactor);
}

void NgramIndex::read_words(std::string_view text) {
  words_.clear();
  sums_.assign(1, 0);
  hash_words(text, characters_, [&](uint64_t hash, const char* begin, const char* end) {
    words_.emplace_back(begin - text.data(), end - text.data());
    sums_.push_back(sums_.back() * kFactor + hash);
  });
}

uint64_t NgramIndex::hash_of(size_t first, size_t size) const {
  const uint64_t hash = sums_[first + size] - sums_[first] * powers_[size];
  // The low bits of a product do not depend on its high bits.
  return (hash ^ hash >> 32) * kHashFactor + size;
}

bool NgramIndex::may_contain(uint64_t hash) const {
  const uint64_t bits = bits_of(hash);
  return (filter_[hash >> shift_] & bits) == bits;
}

bool NgramIndex::add(std::string_view text, uint32_t set) {
  read_words(text);
  if (words_.size() < shortest_) return false;
  const size_t size = std::min(longest_, words_.size());
  for (size_t first = 0; first + size <= words_.size(); ++first)
    entries_.emplace_back(hash_of(first, size), set);
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
  const uint64_t hash = hash_of(first, size);
  if (!may_contain(hash)) return;
  auto entry = std::lower_bound(entries_.begin(), entries_.end(), std::make_pair(hash, 0u));
  for (; entry != entries_.end() && entry->first == hash; ++entry)
    matches.push_back({static_cast<int64_t>(first), static_cast<int64_t>(first + size), 0, 0,
                       static_cast<int64_t>(entry->second)});
}

size_t NgramIndex::find(std::string_view text, std::vector<NgramMatch>& matches) {
  if (filter_.empty()) throw std::logic_error("call finish before find");
  matches.clear();
  read_words(text);
  for (size_t first = 0; first < words_.size(); ++first)
    for (const size_t size : sizes_)
      if (first + size <= words_.size()) find_at(first, size, matches);
  if (matches.empty()) return words_.size();
  count_code_points(text, words_);
  for (NgramMatch& match : matches) {
    match.begin = static_cast<int64_t>(words_[match.first_word].first);
    match.end = static_cast<int64_t>(words_[match.end_word - 1].second);
  }
  return words_.size();
}

}  // namespace tokamake
