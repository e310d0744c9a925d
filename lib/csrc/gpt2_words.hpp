// Words of a text as GPT-2's pre-tokenizer splits it (Radford et al. 2019, its encoder.py):
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// The expression is equivalent to rules about where a word begins. A letter, digit or sign begins a
// word if the character before it has another class and is not a space (a single space belongs to
// the word). White space begins a word at the first character of a run, and again at its last
// character if something follows. The rules need one character on each side, so 64 bytes of ASCII
// are classified together. Contractions are corrected afterwards: until then, their apostrophe is a
// word of one sign.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text.hpp"

namespace tokamake {

// Class of a code point in the expression, and values of the table of Gpt2Words.
enum CharacterClass : uint8_t { kSign = 0, kLetter = 1, kDigit = 2, kWhiteSpace = 3 };

class Gpt2Words {
 public:
  // `classes` has an entry for each code point from 0 to 0x10FFFF. ASCII has Unicode's classes.
  explicit Gpt2Words(std::vector<uint8_t> classes);

  // Calls `emit` with each word of a text of valid UTF-8, in order. The words concatenate to the
  // text.
  template <typename Emit>
  void split(std::string_view text, const Emit& emit) const {
    Before before;
    size_t begin = 0;
    for (size_t at = 0; at < text.size(); at += kBlock) {
      uint64_t starts = starts_in_block(text, at, before);
      for (; starts != 0; starts &= starts - 1) {
        const size_t end = at + static_cast<size_t>(__builtin_ctzll(starts));
        if (end <= begin) continue;  // inside a contraction, or at the beginning of the text
        const size_t size = word_size(text, begin, end);
        emit(text.substr(begin, size));
        begin += size;
      }
    }
    if (begin < text.size()) emit(text.substr(begin));
  }

 private:
  static constexpr size_t kBlock = 64;

  // Class of the last character before a block, in bit 0 of each field. All 0 before the first
  // block.
  struct Before {
    uint64_t letter = 0, digit = 0, sign = 0, white = 0, space = 0;
  };

  // Bit mask of the bytes of the block at `at` that begin a word, before contractions are
  // corrected. Bit 0 is the first byte.
  uint64_t starts_in_block(std::string_view text, size_t at, Before& before) const;
  uint64_t starts_by_character(std::string_view text, size_t at, Before& before) const;
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
