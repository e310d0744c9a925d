// Byte pair encoding of single words (Sennrich, Haddow and Birch 2016, arXiv:1508.07909).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text.hpp"

namespace tokamake {

class Merges {
 public:
  struct Merge {
    uint32_t left, right, merged;
  };

  // `bytes` has the tokens of single bytes. `merges` is in order of rank.
  Merges(const std::array<uint32_t, 256>& bytes, const std::vector<Merge>& merges);

  // Repeatedly replaces the pair of lowest rank, the leftmost if there are several, by its merged
  // token, until no two neighbors can merge. Appends the tokens of the word to `ids`.
  void encode(std::string_view word, std::vector<uint32_t>& ids) const;

 private:
  static constexpr int kBits = 21;  // of a token or rank: three of them fit into 64 bits
  static constexpr uint32_t kNone = UINT32_MAX;  // rank of a pair that cannot merge

  uint32_t rank_of(uint32_t left, uint32_t right) const {
    const uint64_t pair = uint64_t{left} << kBits | right;
    const uint64_t hash = hash_of(pair);
    if (!may_merge_[hash & (may_merge_.size() - 1)]) return kNone;
    for (size_t at = hash;; ++at) {
      const uint64_t slot = slots_[at & (slots_.size() - 1)];
      if (slot == 0) return kNone;
      if (slot >> (kBits + 1) == pair) return (slot & ((uint64_t{1} << (kBits + 1)) - 1)) - 1;
    }
  }
  static uint64_t hash_of(uint64_t pair) {
    pair *= kHashFactor;
    return pair ^ pair >> 32;
  }
  uint32_t rank_of_bytes(char left, char right) const {
    return byte_ranks_[size_t{static_cast<uint8_t>(left)} << 8 | static_cast<uint8_t>(right)];
  }
  void encode_short(std::string_view word, std::vector<uint32_t>& ids) const;
  void encode_long(std::string_view word, std::vector<uint32_t>& ids) const;

  std::array<uint32_t, 256> bytes_;
  std::vector<uint32_t> merged_;  // by rank
  // Filter by hash, with 8 bits for each slot of slots_: answers most look-ups of pairs that cannot
  // merge, and fits the cache better than slots_.
  std::vector<bool> may_merge_;
  std::vector<uint64_t> slots_;       // hash table with open addressing: pair and rank + 1, or 0
  std::vector<uint32_t> byte_ranks_;  // rank of each pair of bytes: half of all look-ups
};

}  // namespace tokamake
