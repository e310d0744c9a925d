// Text before and after the tokenizer: which texts hold certain code points, and packing of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tokamake {

// Whether a string of code points of 2 or 4 bytes holds one that `table`, a byte for each code
// point from 0 to 0x10FFFF, marks.
template <typename Unit>
bool holds_marked(const Unit* text, int64_t size, const uint8_t* table);

// Copies the tokens of all documents one after the other, with `bos` before and `eod` after each
// document that has a token; a negative one is left out. `packed` has room for `packed_size`
// tokens. Throws std::invalid_argument if a length is negative or the lengths do not add up to
// `size` or to `packed_size` with bos and eod, std::out_of_range if a token does not fit T.
template <typename T>
void pack_tokens(const uint32_t* ids, int64_t size, const int64_t* lengths, int64_t documents,
                 int64_t bos, int64_t eod, T* packed, int64_t packed_size);

}  // namespace tokamake
