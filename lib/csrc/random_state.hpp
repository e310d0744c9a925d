// Numbers of numpy.random.RandomState(seed), bit for bit.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "shuffle.hpp"

namespace tokamake {

// Each function draws as many words of the Mersenne twister as NumPy's method of the same purpose,
// so that a sequence of calls gives the same numbers.
class RandomState {
 public:
  explicit RandomState(uint32_t seed) { reseed(seed); }
  RandomState(const RandomState&) = delete;
  RandomState& operator=(const RandomState&) = delete;

  void reseed(uint32_t seed);

  // random(): 53 bits, in [0, 1).
  double uniform() {
    const uint32_t high = twister_.next() >> 5;
    const uint32_t low = twister_.next() >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
  }

  // randint(low, low + size): size is 1 or more. A size of 1 draws nothing.
  int64_t integer(int64_t low, uint32_t size);

  // geometric(p) for p below 1/3: how many trials there are until the first success.
  int64_t geometric(double p);

  // choice(len(cumulative), p=...): `cumulative` has the cumulative probabilities, the last is 1.
  int64_t choice(const std::vector<double>& cumulative);

  // shuffle(list) of the values.
  void shuffle(std::vector<int32_t>& values);

 private:
  std::array<uint32_t, Twister::kWords> key_;
  Twister twister_{key_.data(), Twister::kWords};
};

}  // namespace tokamake
