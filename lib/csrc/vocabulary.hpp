// Vocabulary and merges in the JSON text of a tokenizer.json. They may have a million entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "merges.hpp"
#include "word_cache.hpp"

namespace tokamake {

struct ModelSpans {
  struct Span {  // places in a text
    size_t begin = 0, end = 0;
  };
  Span vocab, merges;
  uint32_t highest = 0;  // id of the vocabulary
};

// Finds an object `vocab` and an array `merges` in the `model` of a tokenizer.json. Returns false
// if there are none.
bool find_model(std::string_view definition, ModelSpans& found);

class Vocabulary {
 public:
  // JSON of an object, and of an array of pairs, which may be strings with a space.
  Vocabulary(std::string_view vocab, std::string_view merges);

  const uint32_t* id(std::string_view text) const;
  const std::vector<Merges::Merge>& merges() const { return merges_; }

  using Ids = std::vector<std::pair<std::string, uint32_t>>;
  const Ids& words() const { return words_; }
  // Tokens of single characters.
  Ids characters() const;
  // Words of bytes: each of 256 characters of `alphabet` stands for a byte. Other words are left
  // out.
  Ids byte_words(const std::vector<uint32_t>& alphabet) const;

  // (256 * 256) whether some merged token has the second of two bytes right after the first. Bytes
  // within a character have joints. A space counts as U+2581.
  const std::vector<uint8_t>& joints() const { return joints_; }

 private:
  void add_joints(std::string_view merged);

  Ids words_;
  WordTable ids_;
  std::vector<Merges::Merge> merges_;
  std::vector<uint8_t> joints_;
};

}  // namespace tokamake
