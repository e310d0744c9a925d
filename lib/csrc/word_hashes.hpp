// Hashes of the words of a text, as near-duplicates and decontamination compare them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text.hpp"

namespace tokamake {

// Values of the table of characters beside lower-case code points.
constexpr uint32_t kSeparator = 0;         // between words
constexpr uint32_t kWordAlone = 1u << 31;  // flag: a word of its own, as in texts without spaces

// Finalizer of SplitMix64 (Steele, Lea, Flood 2014).
inline uint64_t mixed(uint64_t value) {
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
  value = (value ^ value >> 27) * 0x94D049BB133111EB;
  return value ^ value >> 31;
}

// Entry of the code point at `at`, which advances; code points after the table are words of their
// own.
inline uint32_t next_character(const char*& at, const std::vector<uint32_t>& characters) {
  const uint32_t code_point = next_code_point(at);
  return code_point < characters.size() ? characters[code_point] : code_point | kWordAlone;
}

// Calls visit(hash, begin, end) for each word of a text of valid UTF-8.
template <typename Visit>
void hash_words(std::string_view text, const std::vector<uint32_t>& characters, Visit visit) {
  uint64_t word = 0;  // 0: no word has begun
  const char* at = text.data();
  const char* const end = at + text.size();
  const char* begin = at;
  const auto end_word = [&](const char* word_end) {
    if (word != 0) visit(mixed(word), begin, word_end);
    word = 0;
  };
  while (at < end) {
    const char* const first = at;
    const uint32_t character = next_character(at, characters);
    if (character == kSeparator) {
      end_word(first);
    } else if (character & kWordAlone) {
      end_word(first);
      visit(mixed(character), first, at);
    } else {
      if (word == 0) begin = first;
      word = (word ^ character) * kHashFactor;
      word ^= word >> 29;
      word += word == 0;
    }
  }
  end_word(end);
}

}  // namespace tokamake
