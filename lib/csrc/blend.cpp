// Builds the blend greedily, one comparison per sample and dataset.
#include "blend.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace tokamake {
namespace {

void check(const std::vector<double>& weights) {
  constexpr size_t kMost = std::numeric_limits<int16_t>::max();
  if (weights.empty() || weights.size() > kMost) {
    throw std::invalid_argument("a blend takes 1 to 32767 weights");
  }
  for (const double weight : weights) {
    if (!std::isfinite(weight) || weight < 0) {
      throw std::invalid_argument("weights are finite and not negative");
    }
  }
}

}  // namespace

void fill_blend_index(const std::vector<double>& weights, int64_t size, int16_t* dataset_index,
                      int64_t* dataset_sample_index) {
  check(weights);
  std::vector<int64_t> drawn(weights.size(), 0);
  for (int64_t sample = 0; sample < size; ++sample) {
    const double scale = std::max(static_cast<double>(sample), 1.0);
    size_t neediest = 0;
    double largest = weights[0] * scale - static_cast<double>(drawn[0]);
    for (size_t dataset = 1; dataset < weights.size(); ++dataset) {
      const double lag = weights[dataset] * scale - static_cast<double>(drawn[dataset]);
      if (lag > largest) {
        largest = lag;
        neediest = dataset;
      }
    }
    dataset_index[sample] = static_cast<int16_t>(neediest);
    dataset_sample_index[sample] = drawn[neediest]++;
  }
}

}  // namespace tokamake
