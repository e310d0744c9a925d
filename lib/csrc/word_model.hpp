// Models that encode words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace tokamake {

// Several threads may encode at once.
class WordModel {
 public:
  virtual ~WordModel() = default;

  // Replaces `ids` by the tokens of a word of valid UTF-8.
  virtual void encode(std::string_view word, std::vector<uint32_t>& ids) const = 0;

  // Upper bound of the tokens for each byte of a word.
  virtual size_t tokens_per_byte() const { return 1; }
};

}  // namespace tokamake
