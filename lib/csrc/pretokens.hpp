// Words of a text as GPT-2's pre-tokenizer splits it (Radford et al. 2019, its encoder.py):
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// Read the other way round: a letter, digit or sign begins a word where what stands before it is
// of another kind and no single space, which it takes with it; white space begins one where a
// stretch of it begins, and once more at its last character if something follows. So all that is
// needed of the surroundings is one character on each side, and 64 bytes of ASCII are looked at
// together. Contractions are mended afterwards: their apostrophe is a word of one sign by then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace tokamake {

// What a code point is to the expression; the values of the table that PreTokenizer gets.
enum CharacterClass : uint8_t { kSign = 0, kLetter = 1, kDigit = 2, kWhiteSpace = 3 };

// The 8 bytes at `at`, the first of them lowest.
inline uint64_t load_bytes(const char* at) {
  uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i) bytes |= uint64_t{static_cast<uint8_t>(at[i])} << (8 * i);
  return bytes;
}

class PreTokenizer {
 public:
  // `classes` has an entry for each code point from 0 to 0x10FFFF. Throws std::invalid_argument if
  // it has not, or if ASCII is not classified as always.
  explicit PreTokenizer(std::vector<uint8_t> classes);

  // Calls `take` with each word of a text of valid UTF-8, in order; together they are the text.
  template <typename Take>
  void split(std::string_view text, const Take& take) const {
    Before before;
    size_t begin = 0;
    for (size_t at = 0; at < text.size(); at += kBlock) {
      uint64_t starts = starts_in_block(text, at, before);
      for (; starts != 0; starts &= starts - 1) {
        const size_t end = at + static_cast<size_t>(__builtin_ctzll(starts));
        if (end <= begin) continue;  // inside of a contraction, or the first word of all
        const size_t size = word_size(text, begin, end);
        take(text.substr(begin, size));
        begin += size;
      }
    }
    if (begin < text.size()) take(text.substr(begin));
  }

 private:
  static constexpr size_t kBlock = 64;

  // The last character before a block: which kind it is, in bit 0 of each; none at the beginning.
  struct Before {
    uint64_t letter = 0, digit = 0, sign = 0, white = 0, space = 0;
  };

  // The bytes of the block at `at` where a word begins but for contractions; bit 0 is the first.
  uint64_t starts_in_block(std::string_view text, size_t at, Before& before) const;
  uint64_t starts_one_by_one(std::string_view text, size_t at, Before& before) const;
  bool is_white_at(std::string_view text, size_t at) const;
  CharacterClass class_at(std::string_view text, size_t at, size_t& size) const;

  static size_t contraction_size(std::string_view text, size_t begin);
  static size_t word_size(std::string_view text, size_t begin, size_t end) {
    const size_t size = end - begin;
    if (text[begin] != '\'' || size != 1) return size;
    return contraction_size(text, begin);
  }

  std::vector<uint8_t> classes_;
};

}  // namespace tokamake
