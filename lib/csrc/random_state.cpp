// Distributions of NumPy's legacy generator, whose numbers no longer change between its versions.
#include "random_state.hpp"

#include <algorithm>
#include <cmath>

namespace tokamake {

void RandomState::reseed(uint32_t seed) {
  // Knuth's recurrence, as in the twister's own initialization.
  for (uint32_t i = 0; i < key_.size(); ++i) {
    key_[i] = seed;
    seed = 1812433253u * (seed ^ (seed >> 30)) + i + 1;
  }
  twister_ = Twister(key_.data(), Twister::kWords);
}

int64_t RandomState::integer(int64_t low, uint32_t size) {
  const uint32_t last = size - 1;
  if (last == 0) return low;
  uint32_t mask = last;
  for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
  uint32_t drawn = twister_.next() & mask;
  while (drawn > last) drawn = twister_.next() & mask;
  return low + drawn;
}

int64_t RandomState::geometric(double p) {
  return static_cast<int64_t>(std::ceil(std::log1p(-uniform()) / std::log(1 - p)));
}

int64_t RandomState::choice(const std::vector<double>& cumulative) {
  return std::upper_bound(cumulative.begin(), cumulative.end(), uniform()) - cumulative.begin();
}

void RandomState::shuffle(std::vector<int32_t>& values) {
  const auto last = static_cast<int64_t>(values.size()) - 1;
  if (last > 0) tokamake::shuffle(values.data(), last, 0, twister_);
}

}  // namespace tokamake
