// Byte pair encoding of single words (Sennrich, Haddow and Birch 2016, arXiv:1508.07909).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text.hpp"
#include "word_cache.hpp"
#include "word_model.hpp"

namespace tokamake {

class Merges : public WordModel {
 public:
  struct Merge {
    uint32_t left, right, merged;
  };

  // `bytes` has the tokens of single bytes. `merges` is in order of rank; with `shares_ranks`,
  // adjacent merges to the same token have the same rank. If `characters` has tokens of characters,
  // bytes are used for other characters only, and a space counts as U+2581. `whole` words have a
  // token, whatever the merges.
  Merges(const std::array<uint32_t, 256>& bytes, const std::vector<Merge>& merges,
         WordTable characters, bool shares_ranks, WordTable whole);

  // Repeatedly replaces the pair of lowest rank, the leftmost if there are several, by its merged
  // token, until no two neighbors can merge. Replaces `ids` by the tokens of the word.
  void encode(std::string_view word, std::vector<uint32_t>& ids) const override;

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
  void append_characters(std::string_view word, std::vector<uint32_t>& ids) const;
  // Merges the tokens of `ids`.
  void merge_few(std::vector<uint32_t>& ids) const;
  void merge_many(std::vector<uint32_t>& ids) const;

  std::array<uint32_t, 256> bytes_;
  std::vector<uint32_t> merged_;  // by rank
  // Filter by hash, with 8 bits for each slot of slots_: answers most look-ups of pairs that cannot
  // merge, and fits the cache better than slots_.
  std::vector<bool> may_merge_;
  std::vector<uint64_t> slots_;  // hash table with open addressing: pair and rank + 1, or 0
  WordTable characters_, whole_;
};

}  // namespace tokamake
