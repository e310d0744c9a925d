// Unigram language model of pieces (Kudo 2018, arXiv:1804.10959).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trie.hpp"
#include "word_cache.hpp"
#include "word_model.hpp"

namespace tokamake {

class Unigram : public WordModel {
 public:
  using Pieces = std::vector<std::pair<std::string, double>>;
  // How a text is written before it is divided into pieces: as it is, byte by byte; with U+2581 in
  // place of each space; or with U+2581 before each word between spaces that has none. Then each
  // U+2581 begins a word.
  enum class Marks : uint8_t { kNone, kSpaces, kWords };

  // A piece's place is its token; empty `unknown`: all bytes are pieces. `bytes` are the tokens for
  // the bytes of unknown text, or empty. `spaces` has a byte for each code point from 0 to 0x10FFFF
  // if `marks` is kWords: whether it is a space.
  Unigram(const Pieces& pieces, std::optional<uint32_t> unknown, std::vector<uint32_t> bytes,
          Marks marks, std::vector<uint8_t> spaces);

  // Takes the pieces of each word whose scores have the highest sum: of equal sums, the one found
  // first, from left to right and by size.
  void encode(std::string_view text, std::vector<uint32_t>& ids) const override;

  size_t tokens_per_byte() const override { return marks_ == Marks::kNone ? 1 : 4; }

 private:
  std::string marked(std::string_view text) const;
  void encode_word(std::string_view word, std::vector<uint32_t>& ids) const;
  // Adds the tokens of text that is no piece of the best ones.
  void append_unknown(std::string_view text, std::vector<uint32_t>& ids) const;

  Trie trie_;
  WordTable words_;
  std::vector<double> scores_;
  double unknown_score_;
  std::optional<uint32_t> unknown_;
  std::vector<uint32_t> bytes_;
  Marks marks_;
  std::vector<uint8_t> spaces_;
};

}  // namespace tokamake
