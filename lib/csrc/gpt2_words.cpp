#include "gpt2_words.hpp"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace tokamake {

namespace {

CharacterClass ascii_class(unsigned byte) {
  if ((byte | 0x20) >= 'a' && (byte | 0x20) <= 'z') return kLetter;
  if (byte >= '0' && byte <= '9') return kDigit;
  return byte == ' ' || (byte >= '\t' && byte <= '\r') ? kWhiteSpace : kSign;
}

// Classes of 64 bytes: one bit for each byte.
struct Masks {
  uint64_t letter = 0, digit = 0, white = 0, space = 0, beyond_ascii = 0;
};

#ifdef __SSE2__
// Sets all bits of the bytes in [first, first + size). SSE2 compares signed bytes only, so the
// range is moved to the lowest values.
__m128i within(__m128i bytes, char first, char size) {
  const auto moved = _mm_add_epi8(bytes, _mm_set1_epi8(static_cast<char>(0x80 - first)));
  return _mm_cmplt_epi8(moved, _mm_set1_epi8(static_cast<char>(0x80 + size)));
}

Masks masks_of(const char* block) {
  Masks masks;
  for (int i = 0; i < 64; i += 16) {
    const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + i));
    const auto space = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(' '));
    const auto bits = [&](__m128i mask) {
      return uint64_t{static_cast<uint16_t>(_mm_movemask_epi8(mask))} << i;
    };
    masks.letter |= bits(within(_mm_or_si128(bytes, _mm_set1_epi8(0x20)), 'a', 26));
    masks.digit |= bits(within(bytes, '0', 10));
    masks.white |= bits(_mm_or_si128(within(bytes, '\t', 5), space));
    masks.space |= bits(space);
    masks.beyond_ascii |= bits(bytes);
  }
  return masks;
}
#else
constexpr uint64_t kEach = 0x0101010101010101;  // 1 in each of 8 bytes
constexpr uint64_t kHigh = 0x80 * kEach;

// Sets the highest bit of each byte in [first, last]. All bytes must be below 0x80.
uint64_t within(uint64_t bytes, uint64_t first, uint64_t last) {
  return (bytes + (0x80 - first) * kEach) & ~(bytes + (0x7F - last) * kEach);
}

// Packs the highest bits of 8 bytes into one byte: the multiplication moves each bit to its place.
uint64_t packed(uint64_t bytes) { return ((bytes & kHigh) >> 7) * 0x0102040810204080 >> 56; }

Masks masks_of(const char* block) {
  Masks masks;
  for (int i = 0; i < 64; i += 8) {
    const uint64_t bytes = load_bytes(block + i);
    const uint64_t below = bytes & ~kHigh;
    const uint64_t space = within(below, ' ', ' ');
    masks.letter |= packed(within(below | 0x20 * kEach, 'a', 'z')) << i;
    masks.digit |= packed(within(below, '0', '9')) << i;
    masks.white |= packed(within(below, '\t', '\r') | space) << i;
    masks.space |= packed(space) << i;
    masks.beyond_ascii |= bytes & kHigh;
  }
  return masks;
}
#endif

}  // namespace

Gpt2Words::Gpt2Words(std::vector<uint8_t> classes) : classes_(std::move(classes)) {
  if (classes_.size() != 0x110000)
    throw std::invalid_argument("the table has an entry for each of 0x110000 code points");
  for (unsigned byte = 0; byte < 0x80; ++byte)
    if (classes_[byte] != ascii_class(byte))
      throw std::invalid_argument("ASCII has other classes than in Unicode");
  if (*std::max_element(classes_.begin(), classes_.end()) > kWhiteSpace)
    throw std::invalid_argument("a class is 0 to 3");
}

uint64_t Gpt2Words::starts_in_block(std::string_view text, size_t at, Before& before) const {
  std::array<char, kBlock> last;
  const char* block = text.data() + at;
  const size_t left = text.size() - at;
  if (left < kBlock) {
    // White space at the end of a text is not split, as if more white space followed.
    last.fill(' ');
    std::memcpy(last.data(), block, left);
    block = last.data();
  }
  const Masks is = masks_of(block);
  if (is.beyond_ascii) return starts_by_character(text, at, before);
  const uint64_t sign = ~(is.letter | is.digit | is.white);
  const uint64_t others = (is.letter & ~(is.letter << 1 | before.letter)) |
                          (is.digit & ~(is.digit << 1 | before.digit)) |
                          (sign & ~(sign << 1 | before.sign));
  uint64_t white_follows = is.white >> 1;
  if (is.white >> 63 && (left <= kBlock || is_white_at(text, at + kBlock)))
    white_follows |= uint64_t{1} << 63;
  uint64_t starts = (others & ~(is.space << 1 | before.space)) |
                    (is.white & (~(is.white << 1 | before.white) | ~white_follows));
  if (left < kBlock) starts &= (uint64_t{1} << left) - 1;
  before = {is.letter >> 63, is.digit >> 63, sign >> 63, is.white >> 63, is.space >> 63};
  return starts;
}

uint64_t Gpt2Words::starts_by_character(std::string_view text, size_t at, Before& before) const {
  const size_t end = std::min(text.size(), at + kBlock);
  uint64_t starts = 0;
  size_t size = 0;
  for (size_t here = at; here < end; here += size) {
    // The rest of a character of the previous block.
    if ((static_cast<uint8_t>(text[here]) & 0xC0) == 0x80) {
      size = 1;
      continue;
    }
    const CharacterClass kind = class_at(text, here, size);
    bool is_start = false;
    switch (kind) {
      case kLetter:
        is_start = !before.letter && !before.space;
        break;
      case kDigit:
        is_start = !before.digit && !before.space;
        break;
      case kSign:
        is_start = !before.sign && !before.space;
        break;
      case kWhiteSpace:
        is_start = !before.white || !is_white_at(text, here + size);
        break;
    }
    starts |= uint64_t{is_start} << (here - at);
    before = {kind == kLetter, kind == kDigit, kind == kSign, kind == kWhiteSpace,
              text[here] == ' '};
  }
  return starts;
}

bool Gpt2Words::is_white_at(std::string_view text, size_t at) const {
  size_t size = 0;
  return at >= text.size() || class_at(text, at, size) == kWhiteSpace;
}

CharacterClass Gpt2Words::class_at(std::string_view text, size_t at, size_t& size) const {
  const char* const begin = text.data() + at;
  const char* end = begin;
  const uint32_t code_point = next_code_point(end);
  size = static_cast<size_t>(end - begin);
  return static_cast<CharacterClass>(classes_[code_point]);
}

size_t Gpt2Words::contraction_size(std::string_view text, size_t begin) {
  const std::string_view after = text.substr(begin + 1, 2);
  if (after == "re" || after == "ve" || after == "ll") return 3;
  const char next = after.empty() ? '\0' : after[0];
  return next == 's' || next == 't' || next == 'm' || next == 'd' ? 2 : 1;
}

}  // namespace tokamake
