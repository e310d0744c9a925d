// Sequences of words (n-grams): of evaluation sets, with search for them in texts; and a choice of
// the n-grams of a text by which repeated text is found.
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

// Words of a text, with a hash of any n-gram in constant time.
class WordSequence {
 public:
  // `characters` is as in word_hashes.hpp; no n-gram has more than `longest` words.
  WordSequence(std::vector<uint32_t> characters, size_t longest);

  // Splits another text into words.
  void read(std::string_view text);

  // First byte and end of each word.
  const std::vector<std::pair<size_t, size_t>>& words() const { return words_; }

  // Hash of the n-gram of `size` words from `first` on.
  uint64_t hash_of(size_t first, size_t size) const;

 private:
  std::vector<uint32_t> characters_;
  std::vector<uint64_t> powers_;  // of the factor of `hash_of`
  std::vector<uint64_t> sums_;    // of hashes before each word
  std::vector<std::pair<size_t, size_t>> words_;
};

// N-grams are known by their 64-bit hashes. A search takes time linear in the words of the text.
class NgramIndex {
 public:
  // `characters` is as for `WordSequence`. Texts have n-grams of `longest` words; shorter texts
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
  bool may_contain(uint64_t hash) const;
  void find_at(size_t first, size_t size, std::vector<NgramMatch>& matches) const;

  WordSequence text_;
  size_t longest_, shortest_;
  std::vector<size_t> sizes_;                           // of the n-grams, ascending
  std::vector<std::pair<uint64_t, uint32_t>> entries_;  // hash and set, sorted
  std::vector<uint64_t> filter_;  // Bloom filter with two bits for each hash, in one word
  unsigned shift_ = 63;
};

// An n-gram of a text.
struct WordWindow {
  uint64_t hash;
  int64_t begin, end;  // code points of the text
};

// Chooses n-grams by their hashes (winnowing; Schleimer, Wilkerson, Aiken 2003): the smallest of
// each `group` consecutive n-grams. Two texts that share size + group - 1 consecutive words have a
// chosen n-gram in common.
class WordWindows {
 public:
  // `size`: words of an n-gram; `group` 1 chooses all n-grams.
  WordWindows(std::vector<uint32_t> characters, size_t size, size_t group);

  // Fills `windows` with the chosen n-grams of a text in order, and its first and last one; with
  // none if it has fewer than size + group - 1 words. `end` includes punctuation after the word.
  void choose(std::string_view text, std::vector<WordWindow>& windows);

 private:
  WordSequence text_;
  size_t size_, group_;
};

}  // namespace tokamake
