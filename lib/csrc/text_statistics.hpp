// Counts of a text that filters of its quality compare with thresholds.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tokamake {

// Texts are valid UTF-8; `flags` is a table of word_splitting.hpp. Characters are code points. All
// functions take linear time.

struct WordStatistics {
  int64_t words = 0;
  int64_t plain_words = 0;       // not only punctuation
  int64_t plain_characters = 0;  // of plain words
  int64_t alphabetic_words = 0;  // with a letter
  int64_t stop_words = 0;        // different ones
  int64_t hashes = 0;            // "#"
  int64_t ellipses = 0;          // "..." or "…"
  int64_t lines = 0;             // of str.splitlines
  int64_t bullet_lines = 0;      // starting with "•" or "-"
  int64_t ellipsis_lines = 0;    // ending with an ellipsis
};

WordStatistics word_statistics(std::string_view text, const uint8_t* flags,
                               const std::vector<std::string>& stop_words);

struct LineStatistics {
  int64_t characters = 0;  // without line feeds
  int64_t words = 0;
  int64_t line_feeds = 0;
  int64_t lines = 0;                 // not blank; line feeds end lines
  int64_t ended_lines = 0;           // with a mark that ends a sentence as last character
  int64_t short_lines = 0;           // of at most `short_characters`
  int64_t duplicate_characters = 0;  // of lines that an earlier line equals
};

LineStatistics line_statistics(std::string_view text, const uint8_t* flags,
                               int64_t short_characters);

// Sequences of 2 to 4 words for the most frequent one, and of 5 to 10 words for repeated ones.
constexpr size_t kFirstTop = 2, kFirstRepeated = 5, kLongest = 10;

struct Repetition {
  int64_t characters = 0;
  int64_t paragraphs = 0;  // between two line feeds or more
  int64_t duplicate_paragraphs = 0;
  int64_t duplicate_paragraph_characters = 0;
  int64_t lines = 0;  // between line feeds
  int64_t duplicate_lines = 0;
  int64_t duplicate_line_characters = 0;
  std::vector<int64_t> top;       // (3,) characters of all copies of the most frequent n-gram
  std::vector<int64_t> repeated;  // (6,) characters of n-grams that occurred before
};

// Compares texts and n-grams by hashes of 64 bits. Needs at most about 90 bytes for each word.
// Throws std::length_error beyond 2^32 words or characters.
Repetition repetition(std::string_view text, const uint8_t* flags);

}  // namespace tokamake
