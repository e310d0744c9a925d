// A blend that is exact in integers: each set gives as many samples as were asked of it.
#pragma once

#include <cstdint>
#include <vector>

namespace tokamake {

// Sample k of a set of n samples stands at the point (2 k + 1) / (2 n) between 0 and 1: in the
// middle of the k-th of n equal parts. The blend has all samples in the order of their points;
// among equal ones the lowest set comes first.
//
// How even that is: up to a point x a set has given n x samples, off by 1/2 at most. Let N be the
// sum of all n of the m sets and p = n / N. After L samples, these offs add up to L - N x; so the
// set has given p L, off by at most its own off x (1 - p) and p times the others' offs, together
//   (1 - p) / 2 + p (m - 1) / 2:
// below 1/2 for p = 1 / m and less, at most 1 for every set with p <= 1 / (m - 2), and for all
// sets if there are no more than three. After N samples each set has given exactly its n.
class ExactBlend {
 public:
  // Throws std::invalid_argument if there is no set, more than 2**31 - 1, a negative count, or
  // their sum is above 2**53.
  explicit ExactBlend(std::vector<int64_t> counts);

  int64_t size() const { return size_; }

  // Writes the set and its sample for samples start to stop of the blend, which takes time for
  // all sets some 50 times and for the samples. Throws std::out_of_range if there are none such.
  void fill(int64_t start, int64_t stop, int32_t* sets, int64_t* samples) const;

 private:
  int64_t given(int64_t count, int64_t point) const;
  int64_t given_by_all(int64_t point) const;
  int64_t last_point(int64_t most) const;

  std::vector<int64_t> counts_;
  int64_t size_ = 0;
  bool narrow_ = false;  // 64 bits suffice
};

}  // namespace tokamake
