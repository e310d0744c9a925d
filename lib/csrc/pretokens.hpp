// Splits of a text into words by automata, which tokamake.data.tokenizers._patterns compiles from
// the expressions of tokenizers.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text.hpp"

namespace tokamake {

// Words of a text that wait to be encoded. The word after the last one may have a begin already.
struct WordBatch {
  static constexpr size_t kCapacity = 256;
  struct Word {
    const char *begin, *end;
  };

  void add(const char* begin, const char* end) { words[size++] = {begin, end}; }
  bool is_half_full() const { return size > kCapacity / 2; }

  std::array<Word, kCapacity + 4> words;
  size_t size = 0;
};

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

  // Adds the words of a text of valid UTF-8 to a batch, in order. Calls `flush`, which empties the
  // batch, before it is full.
  template <typename Flush>
  void split(std::string_view text, WordBatch& batch, const Flush& flush) const {
    const char* at = text.data();
    const char* const end = at + text.size();
    while (at < end) {
      if (batch.is_half_full()) flush();
      at = keeps_matches_ ? split_run(at, end, batch) : at;
      if (at < end) at = split_slowly(at, end, batch);
    }
  }

 private:
  // Adds words while each match begins where the one before ends. Returns where the first word
  // begins that is not added: it is not such a match, or the batch is half full.
  const char* split_run(const char* at, const char* end, WordBatch& batch) const;
  // Adds the text before the next match, and the match.
  const char* split_slowly(const char* begin, const char* end, WordBatch& batch) const;
  // End of the match that begins at `at`, or null.
  const char* match(const char* at, const char* end) const;

  size_t class_at(const char*& at) const {
    const auto byte = static_cast<uint8_t>(*at);
    if (byte >= 0x80 && !of_bytes_) return classes_[next_code_point(at)];
    ++at;
    return bytes_[byte];
  }

  std::array<uint8_t, 256> bytes_;  // classes of bytes, or of ASCII
  std::array<bool, 256> can_begin_ = {};
  std::vector<uint8_t> classes_;
  std::vector<uint16_t> transitions_;
  // The same for split_run: four times the index of the next state's first entry. Bit 0: a match
  // ends, and the next one begins here. Bit 1: a match ends here if no longer one follows. Index 0:
  // no match goes on, and none begins.
  std::vector<uint32_t> steps_;
  size_t num_classes_;  // without the end of the text
  bool of_bytes_, keeps_matches_, keeps_gaps_;
};

// Several splitters: each splits the words of the one before. Or `joints`: (256 * 256) whether a
// word can go on from a byte to the next one.
class PreTokenizer {
 public:
  explicit PreTokenizer(std::vector<Splitter> splitters, std::vector<uint8_t> joints = {});

  // As Splitter::split.
  template <typename Flush>
  void split(std::string_view text, WordBatch& batch, const Flush& flush) const {
    if (joints_.empty())
      split_from(0, text, batch, flush);
    else
      split_at_joints(text, batch, flush);
  }

 private:
  template <typename Flush>
  void split_at_joints(std::string_view text, WordBatch& batch, const Flush& flush) const {
    const char* at = text.data();
    const char* const end = at + text.size();
    const char* begin = at++;
    while (at < end) {
      if (batch.is_half_full()) flush();
      const char* const stop = at + std::min<ptrdiff_t>(end - at, WordBatch::kCapacity / 2);
      auto* word = batch.words.data() + batch.size;
      word->begin = begin;
      for (; at < stop; ++at) {
        word->end = at;  // without branches, which could not be predicted
        word[1].begin = at;
        word += !joints_[size_t{static_cast<uint8_t>(at[-1])} << 8 | static_cast<uint8_t>(*at)];
      }
      begin = word->begin;
      batch.size = static_cast<size_t>(word - batch.words.data());
    }
    if (!text.empty()) batch.add(begin, end);
  }

  template <typename Flush>
  void split_from(size_t number, std::string_view text, WordBatch& batch,
                  const Flush& flush) const {
    if (number + 1 == splitters_.size()) return splitters_[number].split(text, batch, flush);
    if (splitters_.empty()) {
      if (batch.is_half_full()) flush();
      if (!text.empty()) batch.add(text.data(), text.data() + text.size());
      return;
    }
    WordBatch words;
    const auto split_words = [&] {
      for (size_t i = 0; i < words.size; ++i) {
        const auto [begin, end] = words.words[i];
        split_from(number + 1, {begin, static_cast<size_t>(end - begin)}, batch, flush);
      }
      words.size = 0;
    };
    splitters_[number].split(text, words, split_words);
    split_words();
  }

  std::vector<Splitter> splitters_;
  std::vector<uint8_t> joints_;
};

}  // namespace tokamake
