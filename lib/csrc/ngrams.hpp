// Sequences of words (n-grams) of evaluation sets, and search for them in texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace tokamake {

// An n-gram of a set that a text contains.
struct NgramMatch {
  int64_t first_word, end_word;
  int64_t begin, end;  // code points of the text
  int64_t set;
};

// N-grams are known by their 64-bit hashes. A search takes time linear in the words of the text.
class NgramIndex {
 public:
  // `characters` is as in word_hashes.hpp. Texts have n-grams of `longest` words; shorter texts
  // with at least `shortest` words are one n-gram.
  NgramIndex(std::vector<uint32_t> characters, size_t longest, size_t shortest);

  // Adds the n-grams of a text of a set. Returns false if the text is too short for any.
  bool add(std::string_view text, uint32_t set);

  // Sorts the n-grams: called once, after the last `add`.
  void finish();

  size_t size() const { return entries_.size(); }

  // Fills `matches`, sorted by first word, length and set. Returns the number of words of the text.
  size_t find(std::string_view text, std::vector<NgramMatch>& matches);

 private:
  void read_words(std::string_view text);
  // Hash of the n-gram of `size` words from `first` on.
  uint64_t hash_of(size_t first, size_t size) const;
  bool may_contain(uint64_t hash) const;
  void find_at(size_t first, size_t size, std::vector<NgramMatch>& matches) const;

  std::vector<uint32_t> characters_;
  size_t longest_, shortest_;
  std::vector<uint64_t> powers_;                        // of the factor of `hash_of`
  std::vector<size_t> sizes_;                           // of the n-grams, ascending
  std::vector<std::pair<uint64_t, uint32_t>> entries_;  // hash and set, sorted
  std::vector<uint64_t> filter_;  // Bloom filter with two bits for each hash, in one word
  unsigned shift_ = 63;
  // Of the text that is read: sums of hashes before each word, and bytes of each word.
  std::vector<uint64_t> sums_;
  std::vector<std::pair<size_t, size_t>> words_;
};

}  // namespace tokamake
