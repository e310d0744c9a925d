// Blend: which dataset, and which of its samples, each sample of a mixture is.
#pragma once

#include <cstdint>
#include <vector>

namespace tokamake {

// Sample i goes to the dataset that lags most behind its share, weight x max(i, 1) - drawn; the
// lowest number wins a tie. Weights are normalized by the caller and used as they are.
// Throws std::invalid_argument if there is no weight, more than int16 can number, or a weight that
// is negative or not finite.
void fill_blend_index(const std::vector<double>& weights, int64_t size, int16_t* dataset_index,
                      int64_t* dataset_sample_index);

}  // namespace tokamake
