#include "json_lines.hpp"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstring>

#include "text.hpp"

namespace tokamake {

namespace {

constexpr int kMaxDepth = 64;
constexpr int kMaxDigits = 17;  // larger numbers may overflow the types of other parsers

// Number of plain bytes, out of the kWide bytes at `at`, before the first quote, backslash, control
// character or non-ASCII byte.
#ifdef __SSE2__
constexpr ptrdiff_t kWide = 16;

int plain_bytes(const char* at) {
  const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  // The signed comparison with 0x20 also finds bytes from 0x80 on.
  const auto others = _mm_or_si128(_mm_cmplt_epi8(bytes, _mm_set1_epi8(0x20)),
                                   _mm_or_si128(_mm_cmpeq_epi8(bytes, _mm_set1_epi8('"')),
                                                _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\'))));
  return __builtin_ctz(static_cast<unsigned>(_mm_movemask_epi8(others)) | 1U << kWide);
}
#else
constexpr ptrdiff_t kWide = 8;

int plain_bytes(const char* at) {
  constexpr uint64_t kEach = 0x0101010101010101;  // 1 in each byte
  const uint64_t bytes = load_bytes(at);
  // Sets the high bit of each byte below the limit. A borrow may corrupt higher bytes only, and
  // only the lowest set bit counts.
  const auto below = [&](uint64_t word, uint64_t limit) { return (word - limit * kEach) & ~word; };
  const uint64_t others =
      bytes | below(bytes, 0x20) | below(bytes ^ '"' * kEach, 1) | below(bytes ^ '\\' * kEach, 1);
  const uint64_t high = others & 0x80 * kEach;
  return high == 0 ? kWide : __builtin_ctzll(high) / 8;
}
#endif

// Size in bytes of the well-formed non-ASCII UTF-8 character at `at`; 0 if there is none.
ptrdiff_t utf8_size(const char* at, const char* end) {
  const auto byte = [&](int i) { return static_cast<uint8_t>(at[i]); };
  const auto follows = [&](int i) { return (byte(i) & 0xC0) == 0x80; };
  const uint8_t first = byte(0);
  if (first < 0xC2 || first > 0xF4) return 0;
  if (first < 0xE0) return end - at >= 2 && follows(1) ? 2 : 0;
  if (first < 0xF0) {
    if (end - at < 3 || !follows(1) || !follows(2)) return 0;
    const bool overlong = first == 0xE0 && byte(1) < 0xA0;
    const bool surrogate = first == 0xED && byte(1) >= 0xA0;
    return overlong || surrogate ? 0 : 3;
  }
  if (end - at < 4 || !follows(1) || !follows(2) || !follows(3)) return 0;
  const bool overlong = first == 0xF0 && byte(1) < 0x90;
  const bool beyond = first == 0xF4 && byte(1) >= 0x90;
  return overlong || beyond ? 0 : 4;
}

char* write_utf8(uint32_t code_point, char* out) {
  const auto put = [&](uint32_t bits) { *out++ = static_cast<char>(bits); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
  return out;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Character of the short escape with this letter; 0 if there is no such escape.
char escaped(char c) {
  switch (c) {
    case '"':
    case '\\':
    case '/':
      return c;
    case 'b':
      return '\b';
    case 'f':
      return '\f';
    case 'n':
      return '\n';
    case 'r':
      return '\r';
    case 't':
      return '\t';
    default:
      return 0;
  }
}

// Parser from left to right. Each function returns false on unexpected input.
class Reader {
 public:
  Reader(std::string_view text, std::string_view key)
      : at_(text.data()), end_(text.data() + text.size()), key_(key) {}

  bool done() const { return at_ == end_; }
  const char* at() const { return at_; }

  // Parses a line, and writes the text under the key to `out`, which it advances.
  bool line(char*& out) {
    bool has_text = false;
    if (!object([&](std::string_view name) {
          if (name != key_) return value(1);
          if (has_text) return false;  // duplicate key
          has_text = true;
          return string<true>(out);
        }))
      return false;
    white();
    return has_text && (done() || *at_ == '\n');
  }

  void next_line() { at_ += !done(); }

  // Skips a string; `escapes` becomes true if it has any.
  bool skip_string(bool& escapes) {
    char* no_output = nullptr;
    return string<false>(no_output, &escapes);
  }

  bool write_string(char*& out) { return string<true>(out); }

 private:
  void white() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }

  bool take(char c) {
    white();
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }

  bool take(std::string_view word) {
    if (static_cast<size_t>(end_ - at_) < word.size() ||
        std::memcmp(at_, word.data(), word.size()) != 0)
      return false;
    at_ += word.size();
    return true;
  }

  // Parses an object. `member` gets each key and parses its value.
  template <typename Member>
  bool object(const Member& member) {
    if (!take('{')) return false;
    if (take('}')) return true;
    do {
      white();
      const char* const begin = at_ + 1;
      bool escapes = false;
      char* no_output = nullptr;
      if (!string<false>(no_output, &escapes) || escapes || !take(':')) return false;
      const char* last = at_;  // search backwards from the colon for the closing quote
      while (*--last != '"') {
      }
      white();
      if (!member(std::string_view(begin, static_cast<size_t>(last - begin)))) return false;
    } while (take(','));
    return take('}');
  }

  bool array(int depth) {
    if (!take('[')) return false;
    if (take(']')) return true;
    do {
      white();
      if (!value(depth)) return false;
    } while (take(','));
    return take(']');
  }

  bool value(int depth) {
    if (at_ == end_ || depth > kMaxDepth) return false;
    char* no_output = nullptr;
    switch (*at_) {
      case '"':
        return string<false>(no_output);
      case '{':
        return object([&](std::string_view) { return value(depth + 1); });
      case '[':
        return array(depth + 1);
      case 't':
        return take("true");
      case 'f':
        return take("false");
      case 'n':
        return take("null");
      default:
        return number();
    }
  }

  bool digits() {
    const char* const begin = at_;
    while (at_ != end_ && is_digit(*at_)) ++at_;
    return at_ != begin && at_ - begin <= kMaxDigits;
  }

  bool number() {  // without an exponent
    if (*at_ == '-') ++at_;
    const char* const begin = at_;
    if (!digits() || (*begin == '0' && at_ - begin > 1)) return false;
    if (at_ == end_ || *at_ != '.') return true;
    ++at_;
    return digits();
  }

  // Parses a string and, if kWrite, writes its text to `out`.
  template <bool kWrite>
  bool string(char*& out, bool* escapes = nullptr) {
    if (at_ == end_ || *at_ != '"') return false;
    ++at_;
    while (true) {
      while (end_ - at_ >= kWide) {
        const int plain = plain_bytes(at_);
        if (kWrite) {
          // A copy of fixed size is faster; kJsonSlack gives it room.
          std::memcpy(out, at_, static_cast<size_t>(kWide));
          out += plain;
        }
        at_ += plain;
        if (plain < kWide) break;
      }
      if (at_ == end_) return false;
      const auto byte = static_cast<uint8_t>(*at_);
      if (byte == '"') {
        ++at_;
        return true;
      }
      if (byte == '\\') {
        if (escapes != nullptr) *escapes = true;
        if (!escape<kWrite>(out)) return false;
      } else if (byte >= 0x80) {
        if (!non_ascii<kWrite>(out)) return false;
      } else if (byte < 0x20) {
        return false;
      } else {  // a plain byte in the last kWide bytes
        if (kWrite) *out++ = *at_;
        ++at_;
      }
    }
  }

  template <bool kWrite>
  bool non_ascii(char*& out) {
    do {
      const ptrdiff_t size = utf8_size(at_, end_);
      if (size == 0) return false;
      if (kWrite) {
        std::memcpy(out, at_, static_cast<size_t>(size));
        out += size;
      }
      at_ += size;
    } while (at_ != end_ && static_cast<uint8_t>(*at_) >= 0x80);
    return true;
  }

  template <bool kWrite>
  bool escape(char*& out) {
    if (end_ - at_ < 2) return false;
    const char c = at_[1];
    at_ += 2;
    if (const char character = escaped(c)) {
      if (kWrite) *out++ = character;
      return true;
    }
    uint32_t unit = 0;
    if (c != 'u' || !four_digits(unit)) return false;
    if (unit >= 0xD800 && unit < 0xE000) {
      uint32_t low = 0;
      if (unit >= 0xDC00 || !take("\\u") || !four_digits(low) || low < 0xDC00 || low >= 0xE000)
        return false;
      unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
    }
    if (kWrite) out = write_utf8(unit, out);
    return true;
  }

  bool four_digits(uint32_t& unit) {
    if (end_ - at_ < 4) return false;
    for (int i = 0; i < 4; ++i) {
      const char c = *at_++;
      const char lower = static_cast<char>(c | 0x20);
      if (is_digit(c))
        unit = unit << 4 | static_cast<uint32_t>(c - '0');
      else if (lower >= 'a' && lower <= 'f')
        unit = unit << 4 | static_cast<uint32_t>(lower - 'a' + 10);
      else
        return false;
    }
    return true;
  }

  const char* at_;
  const char* const end_;
  const std::string_view key_;
};

}  // namespace

bool read_texts(std::string_view lines, std::string_view key, char* out, std::vector<int64_t>& ends,
                std::vector<int64_t>& line_ends) {
  const char* const begin = out;
  for (Reader reader(lines, key); !reader.done(); reader.next_line()) {
    if (!reader.line(out)) return false;
    ends.push_back(out - begin);
    line_ends.push_back(reader.at() - lines.data());
  }
  return true;
}

bool read_string(const char*& at, const char* end, std::string& buffer, std::string_view& text) {
  const char* const begin = at;
  const auto size = static_cast<size_t>(end - at);
  bool escapes = false;
  Reader reader({at, size}, {});
  if (!reader.skip_string(escapes)) return false;
  at = reader.at();
  const auto length = static_cast<size_t>(at - begin) - 2;  // without the quotes
  text = {begin + 1, length};
  if (!escapes) return true;
  buffer.resize(length + kJsonSlack);
  char* out = buffer.data();
  Reader({begin, size}, {}).write_string(out);
  text = {buffer.data(), static_cast<size_t>(out - buffer.data())};
  return true;
}

}  // namespace tokamake
