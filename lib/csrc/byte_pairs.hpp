// BPE of whole texts: added tokens, words, and a cache of their tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "merges.hpp"
#include "pretokens.hpp"
#include "word_cache.hpp"

namespace tokamake {

// Normalizes the clusters of a text that are not known to be normalized.
//
// A cluster is marked characters with the one before them. Text outside of clusters is normalized,
// and no cluster depends on text around it.
class Normalizer {
 public:
  // `marks` has a byte for each code point from 0 to 0x10FFFF, and is empty if nothing is marked.
  explicit Normalizer(std::vector<uint8_t> marks);

  // Returns the text with known clusters normalized; it may use `buffer`. Notes unknown clusters.
  std::string_view normalize(std::string_view text, std::string& buffer);

  void learn(std::string cluster, std::string normalized);

  // Number of bytes in the clusters of a text.
  size_t bytes_in_clusters(std::string_view text) const;

  const std::unordered_set<std::string>& unknown() const { return unknown_; }
  void forget_unknown() { unknown_.clear(); }
  // Forgets all clusters if they are many.
  void begin();

 private:
  template <typename Visit>
  void clusters(std::string_view text, const Visit& visit) const;

  std::vector<uint8_t> marks_;
  std::unordered_map<std::string, std::string> known_;
  std::unordered_set<std::string> unknown_;
  std::string key_;
};

// Texts to find before anything else: from left to right, the longest at each place. If `strips`
// says so, a text also covers the white space before or after it.
class AddedTexts {
 public:
  struct Added {
    std::string text;
    uint32_t id;
    uint32_t strips;  // kBefore | kAfter
  };
  static constexpr uint32_t kBefore = 1, kAfter = 2;

  explicit AddedTexts(const std::vector<Added>& added);

  bool empty() const { return texts_.empty(); }

  // Calls `found` with the token of each text and `between` with the text around them, in order.
  template <typename Found, typename Between>
  void split(std::string_view text, const Found& found, const Between& between) const;

 private:
  // Size of the text at the beginning of `text`, its token and `strips`; 0 if there is none.
  size_t at(std::string_view text, uint32_t& id, uint32_t& strips) const;

  WordTable texts_;                         // id and strips of each
  std::vector<std::vector<size_t>> sizes_;  // by the first two bytes, longest first
  std::string beginnings_;                  // distinct first bytes
};

// Where a space goes before the text between added tokens.
enum class Prefix : uint8_t {
  kNever,
  kUnlessSpace,  // unless the text begins with a space
  kAlways,
  kUnlessMark,       // unless it begins with a space or U+2581
  kFirstUnlessMark,  // the same, at the beginning of a document only
};

// BPE tokenizer of bytes, or of characters with bytes for unknown ones. Not thread-safe.
class BytePairs {
 public:
  // `added` texts are found first, then the rest is normalized, and then `later` texts are found.
  // Text between them gets a space before it as `prefix` says.
  // `whole` words have a token, whatever the merges.
  BytePairs(PreTokenizer words, Merges merges, WordTable whole, AddedTexts added, AddedTexts later,
            Normalizer normalizer, Prefix prefix);

  // Encodes texts of valid UTF-8. Writes their concatenated tokens to `ids`, which has room for
  // `room_for` tokens, and the number of tokens of each text to `lengths`. Returns the number of
  // all tokens. They are wrong if the normalizer then has unknown clusters.
  size_t encode(const std::vector<std::string_view>& texts, uint32_t* ids, int64_t* lengths);

  // Upper bound of the tokens of some texts: one for each byte and each prefix space, and room for
  // the garbage of WordCache::write.
  size_t room_for(const std::vector<std::string_view>& texts) const;

  Normalizer& normalizer() { return normalizer_; }

 private:
  struct Place {  // of a short word in the cache
    WordCache::Key key;
    WordCache::Line* line;
  };

  uint32_t* encode_text(std::string_view text, uint32_t* ids);
  uint32_t* encode_normalized(std::string_view text, uint32_t* ids);
  uint32_t* encode_between(std::string_view text, uint32_t* ids);
  bool has_prefix(std::string_view text) const;
  // Encodes the words of batch_, which are in a text that ends at `end`.
  uint32_t* encode_batch(const char* end, uint32_t* ids);
  // Writes the tokens of batch_[i], which is in no line of the cache.
  uint32_t* encode_word(size_t i, uint32_t* ids);

  PreTokenizer words_;
  Merges merges_;
  WordTable whole_;
  AddedTexts added_, later_;
  Normalizer normalizer_;
  Prefix prefix_;
  WordCache cache_;
  std::string normalized_;
  std::string prefixed_;
  bool is_first_ = false;  // whether text is at the beginning of a document
  WordBatch batch_;
  std::array<Place, WordBatch::kCapacity + 4> places_;  // of batch_, being prefetched
  std::vector<uint32_t> word_ids_;
};

}  // namespace tokamake
