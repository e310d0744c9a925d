// Finds the samples between two points, and sorts them; only integers, up to 128 bits.
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
  int32_t set;
};

}  // namespace

ExactBlend::ExactBlend(std::vector<int64_t> counts) : counts_(std::move(counts)) {
  if (counts_.empty() || counts_.size() > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("a blend takes 1 to 2**31 - 1 sets");
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

// Samples of a set at points up to point / size_: those k with (2 k + 1) / (2 n) <= point / size_.
int64_t ExactBlend::given(int64_t count, int64_t point) const {
  if (narrow_) return (2 * count * point + size_) / (2 * size_);  // several times faster
  return static_cast<int64_t>((2 * Wide{count} * point + size_) / (2 * Wide{size_}));
}

int64_t ExactBlend::given_by_all(int64_t point) const {
  int64_t sum = 0;
  for (const int64_t count : counts_) sum += given(count, point);
  return sum;
}

// The last of the points 0 to size_, as parts of size_, up to which at most so many are given.
int64_t ExactBlend::last_point(int64_t most) const {
  // No set is off by more than 1/2.
  const auto reach = static_cast<int64_t>(counts_.size()) / 2 + 1;
  int64_t low = std::max<int64_t>(most - reach, 0);
  int64_t high = std::min(most + reach, size_);
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (given_by_all(middle) <= most) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

void ExactBlend::fill(int64_t start, int64_t stop, int32_t* sets, int64_t* samples) const {
  if (start < 0 || start > stop || stop > size_) {
    throw std::out_of_range("the blend has no such samples");
  }
  if (start == stop) return;
  const int64_t first = last_point(start);
  const int64_t last = std::min(last_point(stop - 1) + 1, size_);
  std::vector<Sample> found;
  for (size_t set = 0; set < counts_.size(); ++set) {
    const int64_t end = given(counts_[set], last);
    for (int64_t k = given(counts_[set], first); k < end; ++k) {
      found.push_back({k, static_cast<int32_t>(set)});
    }
  }
  const auto before = [&](const Sample& left, const Sample& right) {
    const Wide one = (2 * Wide{left.number} + 1) * counts_[static_cast<size_t>(right.set)];
    const Wide other = (2 * Wide{right.number} + 1) * counts_[static_cast<size_t>(left.set)];
    return one != other ? one < other : left.set < right.set;
  };
  std::sort(found.begin(), found.end(), before);
  const int64_t skipped = start - given_by_all(first);
  for (int64_t i = 0; i < stop - start; ++i) {
    sets[i] = found[static_cast<size_t>(skipped + i)].set;
    samples[i] = found[static_cast<size_t>(skipped + i)].number;
  }
}

}  // namespace tokamake
