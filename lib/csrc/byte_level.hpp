// Byte-level BPE of whole texts: added tokens, words, and the tokens of words seen before.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "merges.hpp"
#include "pretokens.hpp"

namespace tokamake {

// Tokens of the words seen of late. What a word of at most 15 bytes and 3 tokens takes is half a
// cache line, so that the most frequent ones stay near the processor; its line has room for two,
// and the one asked for last stays. Longer words are looked up by their bytes. The memory is
// bounded: all words are forgotten when it is full.
class WordCache {
 public:
  static constexpr size_t kShort = 15;  // bytes of a short word
  static constexpr size_t kFew = 3;     // tokens that stand with it

  struct Key {
    uint64_t first = 0, rest = 0;  // the bytes of a short word, and highest of all their number
  };
  struct Short {
    Key key;
    uint32_t ids[kFew] = {};  // or only where more of them begin in ids_
    uint32_t count = 0;
  };
  struct alignas(64) Line {
    Short latest, earlier;
  };

  WordCache();

  // Where a short word is, if it is known.
  Line& line_of(Key key);

  // Writes the tokens of a word to `out`, and up to kFew in any case. Returns where they end, or
  // null if the word is not known.
  uint32_t* write(Key key, Line& line, uint32_t* out) const;
  uint32_t* write(std::string_view word, uint32_t* out) const;

  void add(Key key, Line& line, const std::vector<uint32_t>& ids);
  void add(std::string_view word, const std::vector<uint32_t>& ids);

 private:
  struct Long {
    uint32_t hash = 0;
    uint32_t text = 0, size = 0;  // in texts_; no word has the size 0
    uint32_t id = 0, count = 0;   // in ids_
  };
  struct Free {
    void operator()(Line* lines) const;
  };

  void clear();
  uint32_t* write(uint32_t id, uint32_t count, uint32_t* out) const;

  std::unique_ptr<Line[], Free> lines_;
  std::vector<Long> slots_;  // hash table with open addressing
  size_t used_ = 0;          // of slots_
  std::string texts_;
  std::vector<uint32_t> ids_;
};

// A tokenizer for one thread.
class ByteLevel {
 public:
  struct Added {
    std::string text;
    uint32_t id;
  };

  // `added` are found in a text before anything else: from left to right, the longest of those
  // that begin at the same place. With `add_prefix_space` what stands between them begins with a
  // space, its own or one put before. Throws std::invalid_argument if an added text is empty.
  ByteLevel(PreTokenizer words, Merges merges, std::vector<Added> added, bool add_prefix_space);

  // Encodes texts of valid UTF-8 one after the other, and says of each how many tokens it has.
  // `ids` has room for `room_for` of them. Returns how many there are.
  size_t encode(const std::vector<std::string_view>& texts, uint32_t* ids, int64_t* lengths);

  // Room for the tokens of so many bytes in so many texts: a byte has one at most, the same holds
  // for a space put before, and what is written at once may reach beyond the tokens.
  size_t room_for(size_t bytes, size_t texts) const {
    const size_t spaces = !add_prefix_space_ ? 0 : added_.empty() ? texts : bytes;
    return bytes + spaces + WordCache::kFew;
  }

 private:
  struct Waiting {
    std::string_view word;
    WordCache::Key key;               // of a short word
    WordCache::Line* line = nullptr;  // null if it is none
  };

  uint32_t* encode_text(std::string_view text, uint32_t* ids);
  uint32_t* encode_between(std::string_view text, uint32_t* ids);
  uint32_t* encode_waiting(uint32_t* ids);

  PreTokenizer words_;
  Merges merges_;
  std::vector<Added> added_;  // longest first
  std::string beginnings_;    // first bytes of added texts, each once
  bool add_prefix_space_;
  WordCache cache_;
  std::string prefixed_;
  std::array<Waiting, 32> waiting_;  // meanwhile the processor fetches their lines of the cache
  size_t num_waiting_ = 0;
  std::vector<uint32_t> found_;
};

}  // namespace tokamake
