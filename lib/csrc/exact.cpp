// Finds the samples between two points and sorts them, in integers of up to 128 bits.
#include "exact.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace tokamake {
namespace {

__extension__ typedef __int128 Wide;

struct Sample {
  int64_t number;
  int32_t dataset;
};

}  // namespace

ExactBlend::ExactBlend(std::vector<int64_t> counts) : counts_(std::move(counts)) {
  if (counts_.empty() || counts_.size() > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("a blend takes 1 to 2**31 - 1 datasets");
  }
  for (const int64_t count : counts_) {
    if (count < 0) throw std::invalid_argument("counts are not negative");
    if (count > (int64_t{1} << 53) - size_) {
      throw std::invalid_argument("counts add up to more than 2**53");
    }
    size_ += count;
  }
  const int64_t most = *std::max_element(counts_.begin(), counts_.end());
  narrow_ = (2 * Wide{most} + 1) * size_ <= std::numeric_limits<int64_t>::max();
}

// Samples of a dataset up to point / size_: all k with (2 k + 1) / (2 n) <= point / size_.
int64_t ExactBlend::samples_up_to(int64_t count, int64_t point) const {
  if (narrow_) return (2 * count * point + size_) / (2 * size_);  // several times faster
  return static_cast<int64_t>((2 * Wide{count} * point + size_) / (2 * Wide{size_}));
}

int64_t ExactBlend::total_up_to(int64_t point) const {
  int64_t sum = 0;
  for (const int64_t count : counts_) sum += samples_up_to(count, point);
  return sum;
}

// Last point, from 0 to size_ in units of 1 / size_, with at most `max_samples` samples up to it.
int64_t ExactBlend::last_point(int64_t max_samples) const {
  // The error of each dataset is at most 1/2.
  const auto reach = static_cast<int64_t>(counts_.size()) / 2 + 1;
  int64_t low = std::max<int64_t>(max_samples - reach, 0);
  int64_t high = std::min(max_samples + reach, size_);
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (total_up_to(middle) <= max_samples) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

void ExactBlend::fill(int64_t start, int64_t stop, int32_t* datasets, int64_t* samples) const {
  if (start < 0 || start > stop || stop > size_) {
    throw std::out_of_range("the blend has no such samples");
  }
  if (start == stop) return;
  const int64_t first = last_point(start);
  const int64_t last = std::min(last_point(stop - 1) + 1, size_);
  std::vector<Sample> candidates;
  for (size_t dataset = 0; dataset < counts_.size(); ++dataset) {
    const int64_t end = samples_up_to(counts_[dataset], last);
    for (int64_t k = samples_up_to(counts_[dataset], first); k < end; ++k) {
      candidates.push_back({k, static_cast<int32_t>(dataset)});
    }
  }
  const auto before = [&](const Sample& left, const Sample& right) {
    // Cross-multiplied points: no division, no rounding.
    const Wide a = (2 * Wide{left.number} + 1) * counts_[static_cast<size_t>(right.dataset)];
    const Wide b = (2 * Wide{right.number} + 1) * counts_[static_cast<size_t>(left.dataset)];
    return a != b ? a < b : left.dataset < right.dataset;
  };
  std::sort(candidates.begin(), candidates.end(), before);
  const int64_t skipped = start - total_up_to(first);
  for (int64_t i = 0; i < stop - start; ++i) {
    const Sample& sample = candidates[static_cast<size_t>(skipped + i)];
    datasets[i] = sample.dataset;
    samples[i] = sample.number;
  }
}

}  // namespace tokamake
