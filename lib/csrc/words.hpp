// Words of texts and the tokens of those seen before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tokamake {

// What a code point is to the words around it; the values of the table that Words gets.
enum CharacterKind : uint8_t {
  kInside = 0,    // part of a word
  kSpace = 1,     // between words, without tokens of its own
  kAlone = 2,     // a word of its own, wherever it stands
  kMayBegin = 4,  // flag: the first code point of one of the texts that keep their surroundings
};

// Splits texts into words and remembers the tokens of each word. For tokenizers whose words do not
// depend on their surroundings: a text has the tokens of its words, one after the other.
//
// Use: split, then the tokens of missing() to finish, then the tokens of all texts from write.
class Words {
 public:
  // `kinds` has an entry for each code point from 0 to 0x10FFFF. What stands between two spaces is
  // one word if one of `whole` occurs in it. All words are forgotten once they take more than
  // `capacity` bytes.
  Words(std::vector<uint8_t> kinds, std::vector<std::string> whole, size_t capacity);

  // Splits texts of valid UTF-8. Throws std::length_error beyond 2^32 different words.
  void split(const std::vector<std::string_view>& texts);

  // Words of the latest texts whose tokens are not known yet, until the next call of split.
  const std::vector<std::string_view>& missing() const { return missing_; }

  // Takes the tokens of the missing words, `lengths` of each, one after the other. Throws
  // std::invalid_argument if they are not as many as those words.
  void finish(const uint32_t* ids, int64_t size, const int64_t* lengths, int64_t words);

  int64_t num_texts() const { return static_cast<int64_t>(text_ends_.size()); }
  int64_t num_tokens() const;

  // Writes num_tokens() tokens of the latest texts, and of each text how many.
  void write(uint32_t* ids, int64_t* lengths) const;

 private:
  struct Entry {
    std::string_view word;
    uint64_t first_id;
    uint32_t num_ids;
    uint32_t hash;
  };

  void clear();
  void split_text(std::string_view text);
  bool is_whole(const char* at, const char* end) const;
  void add(const char* begin, const char* end);
  void grow();
  const char* keep(std::string_view word);

  std::vector<uint8_t> kinds_;
  std::vector<std::string> whole_;
  size_t capacity_;
  size_t used_ = 0;                  // bytes of all words, their entries and their tokens
  std::vector<std::string> blocks_;  // text of the words; never moved
  std::vector<Entry> entries_;
  std::vector<uint32_t> slots_;  // hash table with open addressing: number of an entry + 1, or 0
  std::vector<uint32_t> ids_;
  std::vector<uint32_t> latest_;   // entries of the latest texts' words
  std::vector<size_t> text_ends_;  // in latest_
  std::vector<std::string_view> missing_;
  size_t first_missing_ = 0;
  bool finished_ = true;
};

}  // namespace tokamake
