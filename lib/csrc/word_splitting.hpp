// Words of a text, as filters of its quality count them. docs/reference/quality-filters.md has the
// rules.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "text.hpp"

namespace tokamake {

// Flags of a code point, in a table for each code point from 0 to 0x10FFFF.
namespace flag {
constexpr uint8_t kSpace = 1;      // between words
constexpr uint8_t kLineBreak = 2;  // ends a line of Python's str.splitlines
constexpr uint8_t kLetter = 4;
constexpr uint8_t kPunctuation = 8;  // a word of these alone is punctuation
constexpr uint8_t kSentenceEnd = 16;
constexpr uint8_t kMark = 32;   // a word of its own at either end of text between spaces
constexpr uint8_t kAlone = 64;  // a word of its own everywhere
constexpr uint8_t kSign = 128;  // a mark that is one at the end only after a digit
}  // namespace flag

// Start of the last code point before `at`.
inline const char* previous(const char* at) {
  do --at;
  while ((static_cast<uint8_t>(*at) & 0xC0) == 0x80);
  return at;
}

// Number of code points.
inline int64_t length_of(std::string_view text) {
  int64_t length = 0;
  for (const char byte : text) length += (static_cast<uint8_t>(byte) & 0xC0) != 0x80;
  return length;
}

inline bool is_digit(char byte) { return byte >= '0' && byte <= '9'; }
inline bool is_lower(char byte) { return byte >= 'a' && byte <= 'z'; }
inline bool is_upper(char byte) { return byte >= 'A' && byte <= 'Z'; }
inline bool is_alphanumeric(char byte) {
  return is_digit(byte) || is_lower(byte) || is_upper(byte);
}
inline char to_lower(char byte) { return is_upper(byte) ? static_cast<char>(byte + 32) : byte; }

// Calls `visit` with each word of a text in valid UTF-8, in order. Takes linear time and no memory.
template <typename Visit>
class WordSplitter {
 public:
  WordSplitter(const uint8_t* flags, Visit& visit) : flags_(flags), visit_(visit) {}

  void split(std::string_view text) {
    const char* const end = text.data() + text.size();
    for (const char* at = text.data(); at < end;) {
      const char* const begin = at;
      const char* next = at;
      while (at < end && !(flags_[next_code_point(next)] & flag::kSpace)) at = next;
      if (begin < at) split_chunk(begin, at);
      at = next;
    }
  }

 private:
  uint8_t flags_at(const char* at) const { return flags_[next_code_point(at)]; }

  void visit(const char* begin, const char* end) {
    if (begin < end) visit_(std::string_view(begin, static_cast<size_t>(end - begin)));
  }

  // Text between spaces: marks, what is inside, a contraction, and marks.
  void split_chunk(const char* begin, const char* end) {
    begin = visit_marks(begin, end, 2);
    const char* const marks = last_marks(begin, end);
    const char* const contraction = contraction_before(begin, marks);
    split_inside(begin, contraction);
    visit(contraction, marks);
    visit_marks(marks, end, 1);
  }

  static const char* after_dots(const char* at, const char* end) {
    while (at < end && *at == '.') ++at;
    return at;
  }

  // Marks from `at` on; a run of at least `min_dots` full stops is one. Returns the end of them.
  const char* visit_marks(const char* at, const char* end, int min_dots) {
    while (at < end) {
      const char* next = after_dots(at, end);
      if (next - at < min_dots) {
        next = at;
        if (!(flags_[next_code_point(next)] & flag::kMark)) break;
      }
      visit(at, next);
      at = next;
    }
    return at;
  }

  // Start of the marks before `end`. A full stop after a single letter ("e.g.", "J.") is none.
  const char* last_marks(const char* begin, const char* end) const {
    while (begin < end) {
      const char* last = previous(end);
      if (*last == '.') {
        while (begin < last && last[-1] == '.') --last;
        if (end - last == 1 && follows_single_letter(begin, last)) break;
      } else if (!is_mark_at_end(begin, last)) {
        break;
      }
      end = last;
    }
    return end;
  }

  bool is_mark_at_end(const char* begin, const char* at) const {
    const uint8_t flags = flags_at(at);
    if (flags & flag::kSign) return begin < at && is_digit(at[-1]);
    return flags & flag::kMark;
  }

  bool follows_single_letter(const char* begin, const char* at) const {
    if (at == begin) return false;
    const char* const letter = previous(at);
    return flags_at(letter) & flag::kLetter && (letter == begin || letter[-1] == '.');
  }

  // Start of a contraction before `end`, or `end`. A contraction alone is a word.
  static const char* contraction_before(const char* begin, const char* end) {
    const auto is_apostrophe = [&](int back) {  // or the last byte of U+2019
      return end - begin > back && (end[-back] == '\'' || end[-back] == '\x99');
    };
    if (!is_apostrophe(2) && !is_apostrophe(3)) return end;
    for (const std::string_view ending :
         {"n't", "'s", "'d", "'m", "'re", "'ve", "'ll", "n\u2019t", "\u2019s", "\u2019d", "\u2019m",
          "\u2019re", "\u2019ve", "\u2019ll"}) {
      const auto size = static_cast<ptrdiff_t>(ending.size());
      if (end - begin > size &&
          std::equal(ending.begin(), ending.end(), end - size,
                     [](char expected, char byte) { return expected == to_lower(byte); })) {
        return end - size;
      }
    }
    return end;
  }

  // Whether a text begins with www. or with ASCII letters or digits and ://
  static bool is_address(std::string_view text) {
    size_t at = 0;
    while (at < text.size() && (is_digit(text[at]) || is_lower(to_lower(text[at])))) ++at;
    return text.substr(0, 4) == "www." || (at > 0 && text.substr(at, 3) == "://");
  }

  void split_inside(const char* begin, const char* end) {
    const std::string_view text(begin, static_cast<size_t>(end - begin));
    const char* word = begin;
    const bool is_word = is_address(text);
    for (const char* at = begin; at < end && !is_word;) {
      const char* const after = after_divider(begin, at, end);
      if (after > at) {
        visit(word, at);
        visit(at, after);
        word = at = after;
      } else {
        next_code_point(at);
      }
    }
    visit(word, end);
  }

  // End of the divider of words at `at`; `at` if there is none.
  const char* after_divider(const char* begin, const char* at, const char* end) const {
    if (is_lower(*at) || is_upper(*at) || is_digit(*at)) return at;
    const char* next = at;
    const uint32_t point = next_code_point(next);
    if (flags_[point] & flag::kAlone) return next;
    if (*at == '.' && next < end && *next == '.') return after_dots(at, end);
    if (at == begin) return at;
    if (point == '-') {
      while (next < end && next - at < 3 && *next == '-') ++next;
    }
    if (next == end) return at;
    const char before = at[-1];
    const bool letter_before = flags_at(previous(at)) & flag::kLetter;
    const bool letter_after = flags_at(next) & flag::kLetter;
    const bool digit_before = is_digit(before);
    bool divides = false;
    switch (point) {
      case '.':
        divides = is_lower(before) && is_upper(*next);
        break;
      case ',':
        divides = letter_before && letter_after;
        break;
      case '-':
        divides = next - at == 1 && digit_before && is_digit(*next);
        [[fallthrough]];
      case ':':
      case '<':
      case '>':
      case '=':
      case '/':
      case '~':
      case 0x2013:
      case 0x2014:
        divides = divides || ((letter_before || digit_before) && letter_after);
        break;
      case '+':
      case '*':
      case '^':
        divides = digit_before && (is_digit(*next) || *next == '-');
    }
    return divides ? next : at;
  }

  const uint8_t* flags_;
  Visit& visit_;
};

template <typename Visit>
void split_words(std::string_view text, const uint8_t* flags, Visit&& visit) {
  WordSplitter<std::remove_reference_t<Visit>>(flags, visit).split(text);
}

// Calls `visit` with each line of Python's str.splitlines.
template <typename Visit>
void split_lines(std::string_view text, const uint8_t* flags, Visit&& visit) {
  const char* const end = text.data() + text.size();
  const char* line = text.data();
  for (const char* at = line; at < end;) {
    const char* const stop = at;
    if (!(flags[next_code_point(at)] & flag::kLineBreak)) continue;
    if (*stop == '\r' && at < end && *at == '\n') ++at;
    visit(std::string_view(line, static_cast<size_t>(stop - line)));
    line = at;
  }
  if (line < end) visit(std::string_view(line, static_cast<size_t>(end - line)));
}

inline std::string_view strip_left(std::string_view text, const uint8_t* flags) {
  const char* const end = text.data() + text.size();
  const char* begin = text.data();
  for (const char* at = begin; at < end && flags[next_code_point(at)] & flag::kSpace;) begin = at;
  return {begin, static_cast<size_t>(end - begin)};
}

inline std::string_view strip_right(std::string_view text, const uint8_t* flags) {
  const char* end = text.data() + text.size();
  while (end > text.data()) {
    const char* last = previous(end);
    const char* const start = last;
    if (!(flags[next_code_point(last)] & flag::kSpace)) break;
    end = start;
  }
  return {text.data(), static_cast<size_t>(end - text.data())};
}

inline std::string_view strip(std::string_view text, const uint8_t* flags) {
  return strip_right(strip_left(text, flags), flags);
}

inline bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

}  // namespace tokamake
