// Shuffles arrays bit for bit like numpy.random.RandomState, but faster.
#pragma once

#include <cstdint>

namespace tokamake {

// Mersenne twister MT19937 (Matsumoto and Nishimura, 1998). The caller owns the state.
class Twister {
 public:
  static constexpr int64_t kWords = 624;

  Twister(uint32_t* key, int64_t position) : key_(key), position_(position) {}

  int64_t position() const { return position_; }

  uint32_t next() {
    if (position_ == kWords) refill();
    uint32_t word = key_[position_++];
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    return word ^ (word >> 18);
  }

 private:
  void refill();

  uint32_t* key_;
  int64_t position_;
};

// Part of a Fisher-Yates shuffle: swaps for the places `last` down to `end` + 1. From the last
// place down to 0 the result equals RandomState.shuffle. `last` is at most 2**32 - 1, `end` at
// least 0.
template <typename T>
void shuffle(T* values, int64_t last, int64_t end, Twister& twister);

}  // namespace tokamake
