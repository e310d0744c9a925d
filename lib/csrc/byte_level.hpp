// Byte-level BPE of whole texts: added tokens, words, and a cache of their tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "merges.hpp"
#include "pretokens.hpp"

namespace tokamake {

// Cache of the tokens of recent words, with bounded memory: a full cache is cleared.
//
// A short word (at most 15 bytes) takes half a cache line of the processor, so that frequent words
// stay in its fast caches. Each line holds two words and evicts the one that was not used last.
// Longer words are in a hash table by their bytes.
class WordCache {
 public:
  static constexpr size_t kShort = 15;  // bytes of a short word
  static constexpr size_t kFew = 3;     // tokens stored in the entry itself

  struct Key {
    uint64_t first = 0, rest = 0;  // bytes of the word, and their number in the highest byte
  };
  struct Short {
    Key key;
    uint32_t ids[kFew] = {};  // if there are more: ids[0] is their position in ids_
    uint32_t count = 0;
  };
  struct alignas(64) Line {
    Short latest, earlier;
  };

  WordCache();

  // Line of a short word.
  Line& line_of(Key key);

  // Writes the tokens of a word to `out`, and possibly garbage up to kFew tokens. Returns the end
  // of the tokens, or null if the word is not in the cache.
  uint32_t* write(Key key, Line& line, uint32_t* out) const;
  uint32_t* write(std::string_view word, uint32_t* out) const;

  void add(Key key, Line& line, const std::vector<uint32_t>& ids);
  void add(std::string_view word, const std::vector<uint32_t>& ids);

 private:
  struct Long {
    uint32_t hash = 0;
    uint32_t text = 0, size = 0;  // position and size in texts_; size 0: free slot
    uint32_t id = 0, count = 0;   // position and number in ids_
  };
  struct Free {
    void operator()(Line* lines) const;
  };

  void clear();
  uint32_t* write(uint32_t id, uint32_t count, uint32_t* out) const;

  std::unique_ptr<Line[], Free> lines_;
  std::vector<Long> slots_;  // hash table with open addressing
  size_t used_ = 0;          // slots
  std::string texts_;
  std::vector<uint32_t> ids_;
};

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

// Texts to find before anything else: from left to right, the longest at each place.
class AddedTexts {
 public:
  struct Added {
    std::string text;
    uint32_t id;
  };

  explicit AddedTexts(std::vector<Added> added);

  bool empty() const { return added_.empty(); }

  // Calls `found` with the token of each text and `between` with the text around them, in order.
  template <typename Found, typename Between>
  void split(std::string_view text, const Found& found, const Between& between) const;

 private:
  const Added* at(std::string_view text) const;

  std::vector<Added> added_;     // longest first
  std::string beginnings_;       // distinct first bytes
  std::vector<bool> may_begin_;  // by the first two bytes
};

// Byte-level BPE tokenizer. Not thread-safe.
class ByteLevel {
 public:
  // `added` texts are found first, then the rest is normalized, and then `later` texts are found.
  // With `add_prefix_space`, text between them gets a space before it, unless it begins with one.
  // `whole` words have a token, whatever the merges.
  ByteLevel(PreTokenizer words, Merges merges, std::unordered_map<std::string, uint32_t> whole,
            AddedTexts added, AddedTexts later, Normalizer normalizer, bool add_prefix_space);

  // Encodes texts of valid UTF-8. Writes their concatenated tokens to `ids`, which has room for
  // `room_for` tokens, and the number of tokens of each text to `lengths`. Returns the number of
  // all tokens. They are wrong if the normalizer then has unknown clusters.
  size_t encode(const std::vector<std::string_view>& texts, uint32_t* ids, int64_t* lengths);

  // Upper bound of the tokens of some texts: one for each byte and each prefix space, and room for
  // the garbage of WordCache::write.
  size_t room_for(const std::vector<std::string_view>& texts) const;

  Normalizer& normalizer() { return normalizer_; }

 private:
  struct PendingWord {
    std::string_view word;
    WordCache::Key key;               // only for short words
    WordCache::Line* line = nullptr;  // null: not a short word
  };

  uint32_t* encode_text(std::string_view text, uint32_t* ids);
  uint32_t* encode_normalized(std::string_view text, uint32_t* ids);
  uint32_t* encode_between(std::string_view text, uint32_t* ids);
  uint32_t* encode_pending(uint32_t* ids);

  PreTokenizer words_;
  Merges merges_;
  std::unordered_map<std::string, uint32_t> whole_;
  AddedTexts added_, later_;
  Normalizer normalizer_;
  bool add_prefix_space_;
  WordCache cache_;
  std::string normalized_;
  std::string prefixed_;
  std::array<PendingWord, 32> pending_;  // words whose cache lines are being prefetched
  size_t num_pending_ = 0;
  std::vector<uint32_t> word_ids_;
};

}  // namespace tokamake
