#include "bpe_training.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "text.hpp"

namespace tokamake {

namespace {
constexpr size_t kFirstSlots = 1 << 12;
}

WordCounts::WordCounts(PreTokenizer words) : words_(std::move(words)), slots_(kFirstSlots) {}

void WordCounts::add(std::string_view text) {
  WordBatch batch;
  const auto count = [&] {
    for (size_t i = 0; i < batch.size; ++i) {
      const auto [begin, end] = batch.words[i];
      add_word({begin, static_cast<size_t>(end - begin)});
    }
    batch.size = 0;
  };
  words_.split(text, batch, count);
  count();
}

void WordCounts::add_word(std::string_view word) {
  const uint32_t hash = hash_of(word);
  const size_t mask = slots_.size() - 1;
  size_t slot = hash & mask;
  for (; slots_[slot] != 0; slot = (slot + 1) & mask) {
    Entry& entry = entries_[slots_[slot] - 1];
    if (entry.hash == hash && entry.size == word.size() &&
        std::string_view(texts_).substr(entry.begin, entry.size) == word) {
      ++entry.count;
      return;
    }
  }
  if (texts_.size() + word.size() > std::numeric_limits<uint32_t>::max())
    throw std::length_error("more than 4 GB of different words");
  entries_.push_back(
      {1, static_cast<uint32_t>(texts_.size()), static_cast<uint32_t>(word.size()), hash});
  texts_.append(word);
  slots_[slot] = static_cast<uint32_t>(entries_.size());
  if (entries_.size() * 2 > slots_.size()) grow();
}

void WordCounts::grow() {
  std::vector<uint32_t> slots(slots_.size() * 2);
  const size_t mask = slots.size() - 1;
  for (size_t i = 0; i < entries_.size(); ++i) {
    size_t slot = entries_[i].hash & mask;
    while (slots[slot] != 0) slot = (slot + 1) & mask;
    slots[slot] = static_cast<uint32_t>(i + 1);
  }
  slots_.swap(slots);
}

BpeTraining::Counts::Counts() : entries_(kFirstSlots) {}

int64_t& BpeTraining::Counts::operator[](Pair pair) {
  if (used_ * 2 > entries_.size()) {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    used_ = 0;
    for (const Entry& entry : old)
      if (entry.pair != kNone) (*this)[entry.pair] = entry.count;
  }
  const size_t mask = entries_.size() - 1;
  size_t slot = pair * kHashFactor >> 20 & mask;
  for (; entries_[slot].pair != pair; slot = (slot + 1) & mask) {
    if (entries_[slot].pair != kNone) continue;
    entries_[slot].pair = pair;
    ++used_;
    break;
  }
  return entries_[slot].count;
}

BpeTraining::BpeTraining(WordCounts&& words, const std::array<uint32_t, 256>& bytes,
                         const std::vector<std::pair<std::string, uint32_t>>& known,
                         uint32_t num_tokens)
    : texts_(num_tokens), num_tokens_(num_tokens) {
  for (size_t byte = 0; byte < bytes.size(); ++byte) {
    texts_.at(bytes[byte]) = std::string(1, static_cast<char>(byte));
    ids_.emplace(texts_[bytes[byte]], bytes[byte]);
  }
  for (const auto& [text, id] : known) ids_.emplace(text, id);
  tokens_.reserve(words.texts().size());
  for (const WordCounts::Entry& entry : words.entries()) {
    words_.push_back({tokens_.size(), entry.size});
    word_counts_.push_back(entry.count);
    for (uint32_t at = entry.begin; at < entry.begin + entry.size; ++at)
      tokens_.push_back(bytes[static_cast<uint8_t>(words.texts()[at])]);
  }
  {
    const WordCounts taken = std::move(words);
  }  // its memory is free from here on
  find_pairs();
}

void BpeTraining::find_pairs() {
  std::unordered_map<Pair, std::vector<uint32_t>> found;
  for (uint32_t number = 0; number < words_.size(); ++number) {
    const auto [begin, size] = words_[number];
    for (uint64_t at = begin + 1; at < begin + size; ++at) {
      const Pair pair = pair_of(tokens_[at - 1], tokens_[at]);
      counts_[pair] += word_counts_[number];
      std::vector<uint32_t>& places = found[pair];
      if (places.empty() || places.back() != number) places.push_back(number);
    }
  }
  for (auto& [pair, places] : found) {
    places.shrink_to_fit();
    add_candidate(pair, std::move(places));
  }
}

void BpeTraining::add_candidate(Pair pair, std::vector<uint32_t> places) {
  const int64_t count = counts_[pair];
  if (count <= 0) return;
  if (free_places_.empty()) {
    free_places_.push_back(static_cast<uint32_t>(places_.size()));
    places_.emplace_back();
  }
  const uint32_t index = free_places_.back();
  free_places_.pop_back();
  places_[index] = std::move(places);
  candidates_.push({count, pair, index});
}

bool BpeTraining::step() {
  while (!candidates_.empty()) {
    Candidate top = candidates_.top();
    candidates_.pop();
    if (const int64_t count = counts_[top.pair]; count != top.count) {
      top.count = count;
      candidates_.push(top);
      continue;
    }
    if (top.count < 1) return false;
    const auto left = static_cast<uint32_t>(top.pair >> 32);
    const auto right = static_cast<uint32_t>(top.pair);
    const auto [entry, is_new] =
        ids_.try_emplace(texts_[left] + texts_[right], static_cast<uint32_t>(num_tokens_));
    const uint32_t result = entry->second;
    if (is_new) ++num_tokens_;
    if (result >= texts_.size()) texts_.resize(result + 1);
    texts_[result] = entry->first;
    merges_.push_back({left, right, result});
    const std::vector<uint32_t> places = std::move(places_[top.places]);
    free_places_.push_back(top.places);
    for (const uint32_t number : places) merge_word(number, top.pair, result);
    add_new_candidates();
    return true;
  }
  return false;
}

// Merges the pair from left to right. Neighbors change at once: a pair in "aaa" is merged once.
void BpeTraining::merge_word(uint32_t number, Pair pair, uint32_t result) {
  auto& [begin, size] = words_[number];
  uint32_t* const word = tokens_.data() + begin;
  const int64_t count = word_counts_[number];
  const auto change = [&](uint32_t left, uint32_t right, int64_t by) {
    const Pair changed = pair_of(left, right);
    counts_[changed] += by;
    if (by > 0) arisen_.emplace_back(changed, number);
  };
  uint32_t kept = 0;
  for (uint32_t at = 0; at < size; ++at) {
    if (at + 1 == size || pair_of(word[at], word[at + 1]) != pair) {
      word[kept++] = word[at];
      continue;
    }
    const uint32_t left = word[at], right = word[++at];
    if (kept > 0) {
      change(word[kept - 1], left, -count);
      change(word[kept - 1], result, count);
    }
    word[kept++] = result;
    if (at + 1 < size) {
      change(right, word[at + 1], -count);
      change(result, word[at + 1], count);
    }
  }
  size = kept;
}

void BpeTraining::add_new_candidates() {
  std::sort(arisen_.begin(), arisen_.end());
  arisen_.erase(std::unique(arisen_.begin(), arisen_.end()), arisen_.end());
  for (size_t at = 0; at < arisen_.size();) {
    const Pair pair = arisen_[at].first;
    std::vector<uint32_t> places;
    for (; at < arisen_.size() && arisen_[at].first == pair; ++at)
      places.push_back(arisen_[at].second);
    places.shrink_to_fit();
    add_candidate(pair, std::move(places));
  }
  arisen_.clear();
}

}  // namespace tokamake
