#include "merges.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>

namespace tokamake {

namespace {

// Bytes of a short word: a linear search of all its pairs is faster than a heap.
constexpr size_t kShort = 64;

}  // namespace

Merges::Merges(const std::array<uint32_t, 256>& bytes, const std::vector<Merge>& merges)
    : bytes_(bytes) {
  size_t size = 4;
  while (3 * size < 4 * merges.size()) size *= 2;
  slots_.resize(size);
  may_merge_.resize(8 * size);
  const auto fits = [](size_t number) { return number < (size_t{1} << kBits) - 1; };
  for (const Merge& merge : merges) {
    const size_t rank = merged_.size();
    if (!fits(rank) || !fits(merge.left) || !fits(merge.right) || !fits(merge.merged))
      throw std::invalid_argument("a token or a rank has more than 21 bits");
    if (rank_of(merge.left, merge.right) != kNone)
      throw std::invalid_argument("two merges have the same pair");
    const uint64_t pair = uint64_t{merge.left} << kBits | merge.right;
    may_merge_[hash_of(pair) & (may_merge_.size() - 1)] = true;
    size_t at = hash_of(pair) & (size - 1);
    while (slots_[at] != 0) at = (at + 1) & (size - 1);
    slots_[at] = pair << (kBits + 1) | (rank + 1);
    merged_.push_back(merge.merged);
  }
  for (const uint32_t left : bytes_) {
    if (!fits(left)) throw std::invalid_argument("a token has more than 21 bits");
    for (const uint32_t right : bytes_) byte_ranks_.push_back(rank_of(left, right));
  }
}

void Merges::encode(std::string_view word, std::vector<uint32_t>& ids) const {
  if (word.size() <= kShort)
    encode_short(word, ids);
  else
    encode_long(word, ids);
}

void Merges::encode_short(std::string_view word, std::vector<uint32_t>& ids) const {
  std::array<uint32_t, kShort> part;   // current tokens
  std::array<uint32_t, kShort> ranks;  // of each pair of neighbors
  constexpr uint64_t kNoPair = uint64_t{kNone} << 32;
  size_t count = word.size();
  for (size_t i = 0; i < count; ++i) part[i] = bytes_[static_cast<uint8_t>(word[i])];
  for (size_t i = 0; i + 1 < count; ++i) ranks[i] = rank_of_bytes(word[i], word[i + 1]);
  while (count > 1) {
    const size_t pairs = count - 1;
    uint64_t lowest = kNoPair;  // rank << 32 | place
    for (size_t i = 0; i < pairs; ++i) lowest = std::min(lowest, uint64_t{ranks[i]} << 32 | i);
    if (lowest >= kNoPair) break;
    const auto best = static_cast<uint32_t>(lowest);
    part[best] = merged_[lowest >> 32];
    std::copy(part.begin() + best + 2, part.begin() + count, part.begin() + best + 1);
    std::copy(ranks.begin() + best + 1, ranks.begin() + pairs, ranks.begin() + best);
    --count;
    if (best + 1 < count) ranks[best] = rank_of(part[best], part[best + 1]);
    if (best > 0) ranks[best - 1] = rank_of(part[best - 1], part[best]);
  }
  for (size_t i = 0; i < count; ++i) ids.push_back(part[i]);
}

// A heap holds ranks with the place of their pair. An entry is stale if its pair has changed since.
void Merges::encode_long(std::string_view word, std::vector<uint32_t>& ids) const {
  if (word.size() >= std::numeric_limits<uint32_t>::max())
    throw std::length_error("a word has 4 GB or more");
  struct Part {
    uint32_t id, rank, before, after;  // `before` and `after` are places or `end`
  };
  const auto end = static_cast<uint32_t>(word.size());
  std::vector<Part> parts(end);
  std::vector<uint64_t> initial;  // heap entries: rank << 32 | place
  for (uint32_t i = 0; i < end; ++i)
    parts[i] = {bytes_[static_cast<uint8_t>(word[i])], kNone, i == 0 ? end : i - 1, i + 1};
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
  for (uint32_t i = 0; i != end; i = parts[i].after) ids.push_back(parts[i].id);
}

}  // namespace tokamake
