// Draws the places of a block of swaps before it does them, so that their memory is prefetched.
#include "shuffle.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace tokamake {
namespace {

constexpr int64_t kBlock = 256;

uint32_t twist(uint32_t high, uint32_t low) {
  const uint32_t joined = (high & 0x80000000u) | (low & 0x7fffffffu);
  return (joined >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
}

// All bits up to the highest one of `value`.
uint32_t ones_below(uint32_t value) {
  for (int shift = 1; shift < 32; shift *= 2) value |= value >> shift;
  return value;
}

// Draws a uniform place from 0 to i for each place i from `last` down, like numpy's legacy
// generator: it draws numbers with the bits of i until one is in range.
void draw_places(int64_t last, int64_t count, Twister& twister, uint32_t* places) {
  int64_t drawn = 0;
  while (drawn < count) {
    const uint32_t mask = ones_below(static_cast<uint32_t>(last - drawn));
    // The mask is the same for all places down to its highest bit.
    const int64_t stop = std::min(count, last - static_cast<int64_t>(mask >> 1));
    while (drawn < stop) {
      places[drawn] = twister.next() & mask;
      drawn += static_cast<int64_t>(places[drawn]) <= last - drawn;
    }
  }
}

}  // namespace

void Twister::refill() {
  constexpr int64_t kAhead = 397;
  for (int64_t i = 0; i < kWords - kAhead; ++i) {
    key_[i] = key_[i + kAhead] ^ twist(key_[i], key_[i + 1]);
  }
  for (int64_t i = kWords - kAhead; i < kWords - 1; ++i) {
    key_[i] = key_[i + kAhead - kWords] ^ twist(key_[i], key_[i + 1]);
  }
  key_[kWords - 1] = key_[kAhead - 1] ^ twist(key_[kWords - 1], key_[0]);
  position_ = 0;
}

template <typename T>
void shuffle(T* values, int64_t last, int64_t end, Twister& twister) {
  std::array<std::array<uint32_t, kBlock>, 2> places;  // this block and the next
  const auto prepare = [&](int64_t from, std::array<uint32_t, kBlock>& block) {
    const int64_t count = std::min(kBlock, from - end);
    draw_places(from, count, twister, block.data());
    for (int64_t i = 0; i < count; ++i) __builtin_prefetch(values + block[i], 1);
  };
  if (last > end) prepare(last, places[0]);
  for (size_t turn = 0; last > end; turn ^= 1) {
    const int64_t count = std::min(kBlock, last - end);
    if (last - count > end) prepare(last - count, places[turn ^ 1]);
    for (int64_t i = 0; i < count; ++i) std::swap(values[last - i], values[places[turn][i]]);
    last -= count;
  }
}

template void shuffle(int32_t*, int64_t, int64_t, Twister&);
template void shuffle(uint32_t*, int64_t, int64_t, Twister&);
template void shuffle(int64_t*, int64_t, int64_t, Twister&);

}  // namespace tokamake
