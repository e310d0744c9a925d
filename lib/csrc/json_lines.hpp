// Fast reader of the texts in lines of plain JSON objects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tokamake {

// Writes the strings under `key`, concatenated in UTF-8, to `out`, which has room for lines.size()
// + kJsonSlack bytes. `ends` gets the end of each text in `out`, `line_ends` the end of each line:
// its line feed, or the end of `lines`.
//
// Accepts RFC 8259 without extensions. Returns false, with undefined output, if a line is not one
// object with exactly one such key, or holds something that is slow or that parsers treat
// differently: blank lines, keys with escapes, lone surrogates, deep nesting, numbers that may be
// too large. The caller then reads the lines with another parser.
bool read_texts(std::string_view lines, std::string_view key, char* out, std::vector<int64_t>& ends,
                std::vector<int64_t>& line_ends);

// Reads the JSON string that begins at `at`, and advances to its end. Its `text` may be in
// `buffer`. Returns false if it is not valid.
bool read_string(const char*& at, const char* end, std::string& buffer, std::string_view& text);

constexpr size_t kJsonSlack = 16;

}  // namespace tokamake
