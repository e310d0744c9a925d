// Splits texts into words and caches the tokens of each word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tokamake {

// Kind of a code point, and values of the table of Words.
enum CharacterKind : uint8_t {
  kInside = 0,    // part of a word
  kSpace = 1,     // between words, without tokens
  kAlone = 2,     // always a word of its own
  kMayBegin = 4,  // flag: first code point of a text in `whole`
};

// For tokenizers whose tokens of a text are the concatenated tokens of its words.
//
// Usage: call split, give the tokens of missing() to finish, and get the tokens of the texts from
// write.
class Words {
 public:
  // `kinds` has an entry for each code point from 0 to 0x10FFFF. Text between two spaces is one
  // word if it contains one of `whole`. A cache of more than `capacity` bytes is cleared.
  Words(std::vector<uint8_t> kinds, std::vector<std::string> whole, size_t capacity);

  // Splits texts of valid UTF-8. Throws std::length_error beyond 2^32 different words.
  void split(const std::vector<std::string_view>& texts);

  // Words of the last split without cached tokens. Valid until the next split.
  const std::vector<std::string_view>& missing() const { return missing_; }

  // Adds the concatenated tokens of the missing words, with the number of tokens of each word.
  void finish(const uint32_t* ids, int64_t size, const int64_t* lengths, int64_t words);

  int64_t num_texts() const { return static_cast<int64_t>(text_ends_.size()); }
  int64_t num_tokens() const;

  // Writes num_tokens() tokens of the texts of the last split, and the number of tokens of each
  // text.
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
  size_t used_ = 0;                  // bytes of words, entries and tokens
  std::vector<std::string> blocks_;  // texts of the words; never reallocated
  std::vector<Entry> entries_;
  std::vector<uint32_t> slots_;  // hash table with open addressing: number of an entry + 1, or 0
  std::vector<uint32_t> ids_;
  std::vector<uint32_t> latest_;   // entries of the words of the last split
  std::vector<size_t> text_ends_;  // ends in latest_
  std::vector<std::string_view> missing_;
  size_t first_missing_ = 0;
  bool finished_ = true;
};

}  // namespace tokamake
