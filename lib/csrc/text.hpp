// Bytes, hashes and code points of texts, and packing of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tokamake {

constexpr uint64_t kHashFactor = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio

inline uint32_t hash_of(std::string_view word) {
  uint64_t hash = word.size() * kHashFactor;
  uint64_t part = 0;
  for (; word.size() >= sizeof part; word.remove_prefix(sizeof part)) {
    std::memcpy(&part, word.data(), sizeof part);
    hash = (hash ^ part) * kHashFactor;
    hash ^= hash >> 32;
  }
  part = 0;
  std::memcpy(&part, word.data(), word.size());
  hash = (hash ^ part) * kHashFactor;
  return static_cast<uint32_t>(hash >> 32);
}

// Arithmetic of sizes, which throws if the result is too large.
inline size_t sum_of(size_t a, size_t b) {
  if (a > SIZE_MAX - b) throw std::length_error("texts are too long");
  return a + b;
}
inline size_t product_of(size_t a, size_t b) {
  if (a != 0 && b > SIZE_MAX / a) throw std::length_error("texts are too long");
  return a * b;
}

// Loads 8 bytes in little-endian order, on any processor.
inline uint64_t load_bytes(const char* at) {
  uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i) bytes |= uint64_t{static_cast<uint8_t>(at[i])} << (8 * i);
  return bytes;
}

// Decodes the code point at `text`, which is valid UTF-8, and advances `text`.
inline uint32_t next_code_point(const char*& text) {
  const auto byte = [&](int i) { return static_cast<uint32_t>(static_cast<uint8_t>(text[i])); };
  const auto low = [&](int i) { return byte(i) & 0x3F; };
  const uint32_t first = byte(0);
  uint32_t code_point = first;
  int size = 1;
  if (first >= 0xF0) {
    code_point = (first & 0x07) << 18 | low(1) << 12 | low(2) << 6 | low(3);
    size = 4;
  } else if (first >= 0xE0) {
    code_point = (first & 0x0F) << 12 | low(1) << 6 | low(2);
    size = 3;
  } else if (first >= 0x80) {
    code_point = (first & 0x1F) << 6 | low(1);
    size = 2;
  }
  text += size;
  return code_point;
}

// Whitespace of Python's str.strip and str.split.
inline bool is_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

// Removes whitespace at both ends of valid UTF-8, as Python's str.strip does.
std::string_view strip(std::string_view text);

// Copies the tokens of all documents, with `bos` before and `eod` after each document that is not
// empty; a negative `bos` or `eod` is left out. `packed` has room for `packed_size` tokens. The
// lengths must add up to `size`, and to `packed_size` with bos and eod.
template <typename T>
void pack_tokens(const uint32_t* ids, int64_t size, const int64_t* lengths, int64_t documents,
                 int64_t bos, int64_t eod, T* packed, int64_t packed_size);

}  // namespace tokamake
