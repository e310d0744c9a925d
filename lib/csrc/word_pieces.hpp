// WordPiece (Devlin et al. 2018, arXiv:1810.04805).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trie.hpp"
#include "word_model.hpp"

namespace tokamake {

class WordPieces : public WordModel {
 public:
  using Words = std::vector<std::pair<std::string, uint32_t>>;
  // Kinds of code points.
  static constexpr uint8_t kSpace = 1;  // between words, without tokens
  static constexpr uint8_t kAlone = 2;  // a word of its own

  // Pieces that do not begin a word have a prefix in the vocabulary. A word that is no sequence of
  // pieces, or has more than `longest` characters, is `unknown`. `kinds` has the kind of each code
  // point from 0 to 0x10FFFF.
  WordPieces(const Words& vocabulary, std::string_view prefix, uint32_t unknown, size_t longest,
             std::vector<uint8_t> kinds);

  // Takes the longest piece at each place of each word of a text.
  void encode(std::string_view text, std::vector<uint32_t>& ids) const override;

 private:
  void encode_word(std::string_view word, size_t num_characters, std::vector<uint32_t>& ids) const;

  Trie beginnings_, continuations_;
  uint32_t unknown_;
  size_t longest_;
  std::vector<uint8_t> kinds_;
};

}  // namespace tokamake
