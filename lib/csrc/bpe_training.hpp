// Training of byte-level BPE (Sennrich et al. 2016): words are counted, then the most frequent pair
// of neighboring tokens becomes a token, again and again. The result is that of the trainer of the
// package tokenizers, which merges only the places where a pair was found when it arose.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pretokens.hpp"

namespace tokamake {

// Numbers of different words. Memory grows with the different words alone.
class WordCounts {
 public:
  explicit WordCounts(PreTokenizer words);

  // Counts the words of a text of valid UTF-8. Throws std::length_error beyond 2^32 bytes of
  // different words.
  void add(std::string_view text);

  struct Entry {
    int64_t count;
    uint32_t begin, size, hash;  // of its bytes in texts()
  };
  const std::vector<Entry>& entries() const { return entries_; }
  const std::string& texts() const { return texts_; }

 private:
  void add_word(std::string_view word);
  void grow();

  PreTokenizer words_;
  std::string texts_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> slots_;  // hash table with open addressing: number of an entry + 1, or 0
};

// Merges of counted words.
class BpeTraining {
 public:
  struct Merge {
    uint32_t left, right, result;
  };

  // Takes over the words. `known` are texts that have a token already, beside the 256 `bytes`.
  BpeTraining(WordCounts&& words, const std::array<uint32_t, 256>& bytes,
              const std::vector<std::pair<std::string, uint32_t>>& known, uint32_t num_tokens);

  // Makes the next merge. Returns whether there was one.
  bool step();

  // Number of tokens, known ones included.
  size_t num_tokens() const { return num_tokens_; }
  const std::vector<Merge>& merges() const { return merges_; }

 private:
  using Pair = uint64_t;  // left << 32 | right
  struct Word {
    uint64_t begin;  // in tokens_
    uint32_t size;
  };
  struct Candidate {
    int64_t count;
    Pair pair;
    uint32_t places;  // index of a list of words

    // The most frequent pair comes first, and of equally frequent ones the least.
    bool operator<(const Candidate& other) const {
      if (count != other.count) return count < other.count;
      if (pair != other.pair) return pair > other.pair;
      return places > other.places;
    }
  };

  // Numbers of pairs: a hash table with open addressing.
  class Counts {
   public:
    Counts();
    int64_t& operator[](Pair pair);

   private:
    struct Entry {
      Pair pair = kNone;
      int64_t count = 0;
    };
    static constexpr Pair kNone = ~Pair{0};

    std::vector<Entry> entries_;
    size_t used_ = 0;
  };

  static Pair pair_of(uint32_t left, uint32_t right) { return Pair{left} << 32 | right; }

  void find_pairs();
  void merge_word(uint32_t number, Pair pair, uint32_t result);
  void add_candidate(Pair pair, std::vector<uint32_t> places);
  void add_new_candidates();

  std::vector<uint32_t> tokens_;
  std::vector<Word> words_;
  std::vector<int64_t> word_counts_;
  Counts counts_;
  std::vector<std::vector<uint32_t>> places_;
  std::vector<uint32_t> free_places_;
  std::priority_queue<Candidate> candidates_;
  std::vector<std::pair<Pair, uint32_t>> arisen_;  // pairs that a step has made, and their word
  std::vector<std::string> texts_;                 // by token; empty if no text can spell it
  std::unordered_map<std::string, uint32_t> ids_;
  std::vector<Merge> merges_;
  size_t num_tokens_;
};

}  // namespace tokamake
