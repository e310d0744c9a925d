// Tokens of words: a hash table, and a cache of recent words.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tokamake {

// Copies tokens to `out`, and returns their end there; throws if it is after `end`.
inline uint32_t* copy_tokens(const uint32_t* ids, size_t count, uint32_t* out,
                             const uint32_t* end) {
  if (count > static_cast<size_t>(end - out)) throw std::length_error("there are too many tokens");
  return std::copy_n(ids, count, out);
}

// Hash table from words to their tokens, by open addressing.
class WordTable {
 public:
  struct Entry {
    uint32_t hash = 0;
    uint32_t text = 0, size = 0;  // position and size of the word; size 0: free
    uint32_t id = 0, count = 0;   // position and number of the tokens
  };

  // All memory is allocated now: room for `capacity` words of 8 bytes and 4 tokens each.
  explicit WordTable(size_t capacity);

  // Entry of a word, or null.
  const Entry* find(std::string_view word) const;
  const uint32_t* ids(const Entry& entry) const { return ids_.data() + entry.id; }

  bool has_room(size_t bytes, size_t num_ids) const;
  // Adds a word that is not in the table.
  const Entry& add(std::string_view word, const std::vector<uint32_t>& ids);
  void clear();
  bool empty() const { return used_ == 0; }

 private:
  size_t place_of(std::string_view word, uint32_t hash) const;

  std::vector<Entry> entries_;
  size_t capacity_, used_ = 0;
  std::string texts_;
  std::vector<uint32_t> ids_;
};

// Cache of the tokens of words, with bounded memory: a full cache is cleared.
//
// Lines repeat recent short words (at most 15 bytes) of the table. Such a word takes half a cache
// line of the processor, so that frequent words stay in its fast caches. A line holds two words and
// evicts the one that came first.
class WordCache {
 public:
  static constexpr size_t kShort = 15;  // bytes of a short word
  static constexpr size_t kFew = 3;     // tokens stored in the line itself

  struct Key {
    uint64_t first = 0, rest = 0;  // bytes of the word, and their number in the highest byte
  };
  struct Short {
    Key key;
    uint32_t ids[kFew] = {};  // if there are more: ids[0] is their position in the table
    uint32_t count = 0;
  };
  struct alignas(64) Line {
    Short latest, earlier;
  };

  WordCache();

  // Line of a short word.
  Line& line_of(Key key) const;

  // Writes the tokens of a short word to `out`, and possibly garbage up to kFew tokens. Returns the
  // end of the tokens, or null if the word is not in its line. Throws if more than kFew tokens go
  // past `end`.
  uint32_t* write(Key key, const Line& line, uint32_t* out, const uint32_t* end) const;
  // The same for any word in the table, without garbage.
  uint32_t* write(std::string_view word, uint32_t* out, const uint32_t* end) const;

  // Adds a word to the table.
  void add(std::string_view word, const std::vector<uint32_t>& ids);
  // Copies a short word from the table to its line.
  void recall(std::string_view word, Key key, Line& line);

 private:
  struct Free {
    void operator()(Line* lines) const;
  };

  std::unique_ptr<Line[], Free> lines_;
  WordTable table_;
};

}  // namespace tokamake
