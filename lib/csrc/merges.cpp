#include "merges.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <utility>

namespace tokamake {

namespace {

// Tokens of a short word: a linear search of all its pairs is faster than a heap.
constexpr size_t kShort = 64;

}  // namespace

Merges::Merges(const std::array<uint32_t, 256>& bytes, const std::vector<Merge>& merges,
               WordTable characters, bool shares_ranks, WordTable whole)
    : bytes_(bytes), characters_(std::move(characters)), whole_(std::move(whole)) {
  size_t size = 4;
  while (3 * size < 4 * merges.size()) size *= 2;
  slots_.resize(size);
  may_merge_.resize(8 * size);
  const auto fits = [](size_t number) { return number < (size_t{1} << kBits) - 1; };
  for (const Merge& merge : merges) {
    if (!shares_ranks || merged_.empty() || merged_.back() != merge.merged)
      merged_.push_back(merge.merged);
    const size_t rank = merged_.size() - 1;
    if (!fits(rank) || !fits(merge.left) || !fits(merge.right) || !fits(merge.merged))
      throw std::invalid_argument("a token or a rank has more than 21 bits");
    if (rank_of(merge.left, merge.right) != kNone)
      throw std::invalid_argument("two merges have the same pair");
    const uint64_t pair = uint64_t{merge.left} << kBits | merge.right;
    may_merge_[hash_of(pair) & (may_merge_.size() - 1)] = true;
    size_t at = hash_of(pair) & (size - 1);
    while (slots_[at] != 0) at = (at + 1) & (size - 1);
    slots_[at] = pair << (kBits + 1) | (rank + 1);
  }
  for (const uint32_t byte : bytes_)
    if (!fits(byte)) throw std::invalid_argument("a token has more than 21 bits");
}

void Merges::encode(std::string_view word, std::vector<uint32_t>& ids) const {
  if (const auto* const known = whole_.find(word)) {
    ids.assign(1, *whole_.ids(*known));
    return;
  }
  ids.clear();
  if (characters_.empty())
    for (const char byte : word) ids.push_back(bytes_[static_cast<uint8_t>(byte)]);
  else
    append_characters(word, ids);
  if (ids.size() <= kShort)
    merge_few(ids);
  else
    merge_many(ids);
}

void Merges::append_characters(std::string_view word, std::vector<uint32_t>& ids) const {
  const char* const end = word.data() + word.size();
  for (const char* at = word.data(); at < end;) {
    const char* const begin = at;
    next_code_point(at);
    const std::string_view character(begin, static_cast<size_t>(at - begin));
    const auto* const known = characters_.find(character == " " ? "\u2581" : character);
    if (known != nullptr)
      ids.push_back(*characters_.ids(*known));
    else
      for (const char byte : character) ids.push_back(bytes_[static_cast<uint8_t>(byte)]);
  }
}

void Merges::merge_few(std::vector<uint32_t>& ids) const {
  std::array<uint32_t, kShort> ranks;  // of each pair of neighbors
  constexpr uint64_t kNoPair = uint64_t{kNone} << 32;
  for (size_t i = 0; i + 1 < ids.size(); ++i) ranks[i] = rank_of(ids[i], ids[i + 1]);
  while (ids.size() > 1) {
    const size_t pairs = ids.size() - 1;
    uint64_t lowest = kNoPair;  // rank << 32 | place
    for (size_t i = 0; i < pairs; ++i) lowest = std::min(lowest, uint64_t{ranks[i]} << 32 | i);
    if (lowest >= kNoPair) break;
    const auto best = static_cast<uint32_t>(lowest);
    ids[best] = merged_[lowest >> 32];
    ids.erase(ids.begin() + best + 1);
    std::copy(ranks.begin() + best + 1, ranks.begin() + pairs, ranks.begin() + best);
    if (best + 1 < ids.size()) ranks[best] = rank_of(ids[best], ids[best + 1]);
    if (best > 0) ranks[best - 1] = rank_of(ids[best - 1], ids[best]);
  }
}

// A heap holds ranks with the place of their pair. An entry is stale if its pair has changed since.
void Merges::merge_many(std::vector<uint32_t>& ids) const {
  if (ids.size() >= std::numeric_limits<uint32_t>::max())
    throw std::length_error("a word has 4 GB or more");
  struct Part {
    uint32_t id, rank, before, after;  // `before` and `after` are places or `end`
  };
  const auto end = static_cast<uint32_t>(ids.size());
  std::vector<Part> parts(end);
  std::vector<uint64_t> initial;  // heap entries: rank << 32 | place
  for (uint32_t i = 0; i < end; ++i) parts[i] = {ids[i], kNone, i == 0 ? end : i - 1, i + 1};
  const auto update_rank = [&](uint32_t i) {
    Part& part = parts[i];
    part.rank = part.after == end ? kNone : rank_of(part.id, parts[part.after].id);
    return part.rank != kNone;
  };
  const auto key = [&](uint32_t i) { return uint64_t{parts[i].rank} << 32 | i; };
  for (uint32_t i = 0; i < end; ++i)
    if (update_rank(i)) initial.push_back(key(i));
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap(std::greater<>(),
                                                                            std::move(initial));
  while (!heap.empty()) {
    const auto i = static_cast<uint32_t>(heap.top());
    const bool stale = heap.top() != key(i);
    heap.pop();
    if (stale) continue;
    Part& part = parts[i];
    Part& removed = parts[part.after];
    part.id = merged_[part.rank];
    part.after = removed.after;
    removed.rank = kNone;
    if (part.after != end) parts[part.after].before = i;
    if (update_rank(i)) heap.push(key(i));
    if (part.before != end && update_rank(part.before)) heap.push(key(part.before));
  }
  ids.clear();
  for (uint32_t i = 0; i != end; i = parts[i].after) ids.push_back(parts[i].id);
}

}  // namespace tokamake
