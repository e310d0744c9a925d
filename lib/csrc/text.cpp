#include "text.hpp"

#include <limits>

namespace tokamake {

namespace {

void check_fits(uint64_t token, uint64_t highest) {
  if (token > highest)
    throw std::out_of_range("token " + std::to_string(token) + " is beyond " +
                            std::to_string(highest));
}

template <typename T>
T* copy_tokens(const uint32_t* ids, int64_t size, T* out) {
  uint32_t highest = 0;
  for (int64_t i = 0; i < size; ++i) {
    highest = highest < ids[i] ? ids[i] : highest;
    out[i] = static_cast<T>(ids[i]);
  }
  check_fits(highest, static_cast<uint64_t>(std::numeric_limits<T>::max()));
  return out + size;
}

}  // namespace

std::string_view strip(std::string_view text) {
  while (!text.empty()) {
    const char* at = text.data();
    if (!is_space(next_code_point(at))) break;
    text.remove_prefix(static_cast<size_t>(at - text.data()));
  }
  while (!text.empty()) {
    size_t last = text.size() - 1;
    while ((text[last] & 0xC0) == 0x80) --last;
    const char* at = text.data() + last;
    if (!is_space(next_code_point(at))) break;
    text = text.substr(0, last);
  }
  return text;
}

template <typename T>
void pack_tokens(const uint32_t* ids, int64_t size, const int64_t* lengths, int64_t documents,
                 int64_t bos, int64_t eod, T* packed, int64_t packed_size) {
  const auto highest = static_cast<uint64_t>(std::numeric_limits<T>::max());
  if (bos >= 0) check_fits(static_cast<uint64_t>(bos), highest);
  if (eod >= 0) check_fits(static_cast<uint64_t>(eod), highest);
  const int64_t around = (bos >= 0) + (eod >= 0);
  T* const end = packed + packed_size;
  for (int64_t i = 0; i < documents; ++i) {
    const int64_t length = lengths[i];
    if (length < 0) throw std::invalid_argument("a length is negative");
    if (length == 0) continue;
    if (length > size || length + around > end - packed)
      throw std::invalid_argument("lengths do not add up to the tokens");
    if (bos >= 0) *packed++ = static_cast<T>(bos);
    packed = copy_tokens(ids, length, packed);
    if (eod >= 0) *packed++ = static_cast<T>(eod);
    ids += length;
    size -= length;
  }
  if (size != 0 || packed != end)
    throw std::invalid_argument("lengths do not add up to the tokens");
}

template void pack_tokens<uint16_t>(const uint32_t*, int64_t, const int64_t*, int64_t, int64_t,
                                    int64_t, uint16_t*, int64_t);
template void pack_tokens<int32_t>(const uint32_t*, int64_t, const int64_t*, int64_t, int64_t,
                                   int64_t, int32_t*, int64_t);

}  // namespace tokamake
