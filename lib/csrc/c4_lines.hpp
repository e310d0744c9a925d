// The lines of a text that the rules of C4 keep.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tokamake {

struct C4Rules {
  int64_t max_word_characters;      // negative: any
  int64_t min_words;                // of a line
  bool end_marks;                   // lines end with a mark of the end of a sentence
  bool citations;                   // remove [1], [edit] and [citation needed]
  bool lorem_ipsum;                 // refuse the text
  bool javascript;                  // drop the line
  bool curly_bracket;               // refuse the text
  std::vector<std::string> policy;  // lower-case phrases that drop the line
};

struct C4Lines {
  std::string text;
  int64_t sentences = 0;
  std::string refused;  // "lorem ipsum" or "{", if the text has it
  // Dropped lines, by rule.
  int64_t long_words = 0;
  int64_t no_end_mark = 0;
  int64_t few_words = 0;
  int64_t javascript = 0;
  int64_t policy = 0;
};

// `text` is valid UTF-8, and `flags` a table of word_splitting.hpp. The rules ignore the case of
// ASCII letters. Takes linear time.
C4Lines c4_lines(std::string_view text, const uint8_t* flags, const C4Rules& rules);

// Number of sentences of a line, at least 1: a word behind a word that is a mark of the end of a
// sentence begins one, unless it is punctuation.
int64_t count_sentences(std::string_view line, const uint8_t* flags);

}  // namespace tokamake
