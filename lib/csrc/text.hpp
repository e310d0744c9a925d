// Search of texts for marked code points, and packing of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tokamake {

// Returns whether a string with code points of 2 or 4 bytes holds a marked one. `table` has a byte
// for each code point from 0 to 0x10FFFF.
template <typename Unit>
bool holds_marked(const Unit* text, int64_t size, const uint8_t* table);

// Copies the tokens of all documents, with `bos` before and `eod` after each document that is not
// empty; a negative `bos` or `eod` is left out. `packed` has room for `packed_size` tokens. Throws
// std::invalid_argument if a length is negative, or the lengths do not add up to `size`, or to
// `packed_size` with bos and eod; std::out_of_range if a token does not fit T.
template <typename T>
void pack_tokens(const uint32_t* ids, int64_t size, const int64_t* lengths, int64_t documents,
                 int64_t bos, int64_t eod, T* packed, int64_t packed_size);

}  // namespace tokamake
