// Splits of a text into words by automata, which tokamake.data.tokenizers._patterns compiles from
// the expressions of tokenizers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "gpt2_words.hpp"
#include "text.hpp"

namespace tokamake {

// One expression. Its leftmost matches, and the text between them, are words.
//
// A character has a class. An entry of `transitions` is for a state and a class; the last class is
// the end of the text. Bit 0 of an entry: a match ends before this character. The other bits are
// the index of the next state's first entry; 0 if no longer match is possible. State 1 is the
// start.
class Splitter {
 public:
  // `classes` has a class for each code point from 0 to 0x10FFFF, or for each of 256 bytes.
  Splitter(std::vector<uint8_t> classes, std::vector<uint16_t> transitions, size_t num_classes,
           bool keeps_matches, bool keeps_gaps);

  // Calls `emit` with each word of a text of valid UTF-8, in order.
  template <typename Emit>
  void split(std::string_view text, const Emit& emit) const {
    const char* const end = text.data() + text.size();
    const char* word = text.data();  // begin of the text since the last match
    const auto view = [](const char* from, const char* to) {
      return std::string_view(from, static_cast<size_t>(to - from));
    };
    for (const char* at = word; at < end;) {
      if (!can_begin_[static_cast<uint8_t>(*at)]) {
        ++at;
        continue;
      }
      const char* const after = match(at, end);
      if (after == nullptr) {
        ++at;  // bytes inside a character begin no match
        continue;
      }
      if (word < at && keeps_gaps_) emit(view(word, at));
      if (keeps_matches_) emit(view(at, after));
      at = word = after;
    }
    if (word < end && keeps_gaps_) emit(view(word, end));
  }

 private:
  // End of the match that begins at `at`, or null.
  const char* match(const char* at, const char* end) const {
    const uint16_t* const transitions = transitions_.data();
    const char* after = nullptr;
    size_t state = num_classes_ + 1;
    while (at < end) {
      const char* const here = at;
      const auto byte = static_cast<uint8_t>(*at);
      size_t kind = bytes_[byte];
      if (byte < 0x80 || of_bytes_)
        ++at;
      else
        kind = classes_[next_code_point(at)];
      const uint16_t entry = transitions[state + kind];
      after = entry & 1 ? here : after;
      state = entry >> 1;
      if (state == 0) return after;
    }
    return transitions[state + num_classes_] & 1 ? end : after;
  }

  std::array<uint8_t, 256> bytes_;  // classes of bytes, or of ASCII
  std::array<bool, 256> can_begin_ = {};
  std::vector<uint8_t> classes_;
  std::vector<uint16_t> transitions_;
  size_t num_classes_;  // without the end of the text
  bool of_bytes_, keeps_matches_, keeps_gaps_;
};

// GPT-2's words, by vectors, or several splitters: each splits the words of the one before.
class PreTokenizer {
 public:
  explicit PreTokenizer(Gpt2Words words);
  explicit PreTokenizer(std::vector<Splitter> splitters);

  // Calls `emit` with each word of a text of valid UTF-8, in order.
  template <typename Emit>
  void split(std::string_view text, const Emit& emit) const {
    if (gpt2_words_)
      gpt2_words_->split(text, emit);
    else if (splitters_.size() == 1)
      splitters_[0].split(text, emit);
    else if (!text.empty())
      split_from(0, text, emit);
  }

 private:
  template <typename Emit>
  void split_from(size_t number, std::string_view text, const Emit& emit) const {
    if (number == splitters_.size()) return emit(text);
    splitters_[number].split(text,
                             [&](std::string_view word) { split_from(number + 1, word, emit); });
  }

  std::optional<Gpt2Words> gpt2_words_;
  std::vector<Splitter> splitters_;
};

}  // namespace tokamake
