// Exact blend in integers: each dataset gives exactly its number of samples.
#pragma once

#include <cstdint>
#include <vector>

namespace tokamake {

// Sample k of a dataset with n samples stands at the point (2 k + 1) / (2 n) between 0 and 1: in
// the middle of the k-th of n equal intervals. The blend orders all samples by their points, and by
// dataset if points are equal.
//
// Evenness. Up to a point x, a dataset gives n x samples, with an error of at most 1/2. Let m be
// the number of datasets, N the sum of all n, and p = n / N. After L samples, the errors of all
// datasets add up to L - N x. So the dataset has given p L samples with an error of at most (1 - p)
// times its own error plus p times the errors of the other factors:
//   (1 - p) / 2 + p (m - 1) / 2.
// This is below 1/2 for p <= 1 / m, and at most 1 for p <= 1 / (m - 2) and for every dataset if
// m <= 3. After N samples each dataset has given exactly n.
class ExactBlend {
 public:
  explicit ExactBlend(std::vector<int64_t> counts);

  int64_t size() const { return size_; }

  // Writes dataset and sample number of samples start to stop. Visits all datasets up to about 50
  // times.
  void fill(int64_t start, int64_t stop, int32_t* datasets, int64_t* samples) const;

 private:
  int64_t samples_up_to(int64_t count, int64_t point) const;
  int64_t total_up_to(int64_t point) const;
  int64_t last_point(int64_t max_samples) const;

  std::vector<int64_t> counts_;
  int64_t size_ = 0;
  bool narrow_ = false;  // products fit 64 bits
};

}  // namespace tokamake
