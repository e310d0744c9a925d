// Tokens of whole texts: added tokens, normalization, words, and a cache of their tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "normalizer.hpp"
#include "pretokens.hpp"
#include "text.hpp"
#include "word_cache.hpp"
#include "word_model.hpp"

namespace tokamake {

// Texts to find before anything else: from left to right, the longest at each place.
class AddedTexts {
 public:
  struct Added {
    std::string text;
    uint32_t id;
    uint32_t flags;
  };
  // Flags: a text also covers the white space before or after it, or is found as a whole word only.
  static constexpr uint32_t kBefore = 1, kAfter = 2, kAlone = 4;

  // `letters` has a byte for each code point from 0 to 0x10FFFF: whether it belongs to a word. It
  // may be empty if no text has kAlone.
  AddedTexts(const std::vector<Added>& added, std::vector<uint8_t> letters);

  bool empty() const { return texts_.empty(); }

  // Calls `found` with the token of each text and `between` with the text around them, in order.
  template <typename Found, typename Between>
  void split(std::string_view text, const Found& found, const Between& between) const;

 private:
  // Size of the text at the beginning of `text`, its token and flags; 0 if there is none.
  size_t at(std::string_view text, uint32_t& id, uint32_t& flags) const;
  bool is_letter(const char* at) const { return letters_[next_code_point(at)]; }
  // Whether no letter is beside a part of a text.
  bool is_word(std::string_view text, size_t begin, size_t end) const;

  WordTable texts_;                         // id and flags of each
  std::vector<std::vector<size_t>> sizes_;  // by the first two bytes, longest first
  std::string beginnings_;                  // distinct first bytes
  std::vector<uint8_t> letters_;
};

// Where a space goes before the text between added tokens.
enum class Prefix : uint8_t {
  kNever,
  kDocument,     // before a document only, also where that begins with an added token
  kUnlessSpace,  // unless the text begins with a space
  kAlways,
  kUnlessMark,       // unless it begins with a space or U+2581
  kFirstUnlessMark,  // the same, at the beginning of a document only
};

// Not thread-safe.
class TextEncoder {
 public:
  struct Rules {
    AddedTexts added;                // found first, then the rest is normalized
    AddedTexts later;                // found in normalized text
    Normalizer normalizer;           // of text, or of each word
    PreTokenizer words;              // splits the text between added texts
    Prefix prefix;                   // of the text between added texts
    bool normalizes_words;           // words are split and looked up as they are in the text
    bool strips_left, strips_right;  // white space at the ends of the text between added texts
    bool strips_normalized;          // the same at the right end of its normalized text
  };

  TextEncoder(std::shared_ptr<const WordModel> model, Rules rules);

  // Encodes texts of valid UTF-8. Writes their concatenated tokens to `ids`, which has room for
  // `room` tokens, and the number of tokens of each text to `lengths`. Returns the number of all
  // tokens. They are wrong if the normalizer then has unknown clusters. Throws if `room` is less
  // than the tokens need; `room_for` is enough.
  size_t encode(const std::vector<std::string_view>& texts, uint32_t* ids, size_t room,
                int64_t* lengths);

  // Upper bound of the tokens of some texts with their prefixes, and room for the garbage of
  // WordCache::write.
  size_t room_for(const std::vector<std::string_view>& texts) const;

  Normalizer& normalizer() { return rules_.normalizer; }

 private:
  struct Place {  // of a short word in the cache
    WordCache::Key key;
    WordCache::Line* line;
  };

  uint32_t* encode_text(std::string_view text, uint32_t* ids);
  uint32_t* encode_normalized(std::string_view text, uint32_t* ids);
  uint32_t* encode_between(std::string_view text, uint32_t* ids);
  bool has_prefix(std::string_view text) const;
  // Encodes the words of batch_, which are in a text that ends at `end`.
  uint32_t* encode_batch(const char* end, uint32_t* ids);
  // Writes the tokens of batch_[i], which is in no line of the cache.
  uint32_t* encode_word(size_t i, uint32_t* ids);

  std::shared_ptr<const WordModel> model_;
  Rules rules_;
  WordCache cache_;
  std::string prefixed_;
  bool is_first_ = false;  // whether text is at the beginning of a document
  WordBatch batch_;
  std::array<Place, WordBatch::kCapacity + 4> places_;  // of batch_, being prefetched
  std::vector<uint32_t> word_ids_;
  const uint32_t* end_ = nullptr;  // of tokens; garbage of WordCache::write has room after it
};

}  // namespace tokamake
