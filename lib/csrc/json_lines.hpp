// Texts of jsonl, taken out of lines that hold plain JSON objects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace tokamake {

// Writes what the strings under `key` say, in UTF-8 and one after the other, to `out`, which has
// room for as many bytes as there are lines, and kJsonSlack more; `ends` says where each text ends
// there, and `line_ends` where each line ends: at its line feed, or at the end of all.
//
// Takes RFC 8259's JSON and no more. Returns false, and leaves nothing of use, if a line is
// anything but one object with a single such key, or holds what would be slow or doubtful here:
// blank lines, keys with escapes, lone surrogates, deep nesting, numbers that may be too large.
// The caller reads the lines in another way then.
bool read_texts(std::string_view lines, std::string_view key, char* out, std::vector<int64_t>& ends,
                std::vector<int64_t>& line_ends);

constexpr size_t kJsonSlack = 16;

}  // namespace tokamake
