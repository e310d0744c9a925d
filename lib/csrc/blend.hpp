// Weighted blend: the dataset of each sample, and the number of the sample in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "lanes.hpp"

namespace tokamake {

// Sample i comes from the leader: the dataset with the largest lag weight x max(i, 1) - drawn, in
// doubles. The lowest number wins a tie. The caller normalizes the weights.
//
// Three steps make this fast. Datasets with equal weights take turns by number, so they form a
// class with one comparison. Only classes that can lead soon are compared: see Pool. Vector
// instructions compare them for consecutive samples: see BlendRun, which stops at cases that it
// cannot handle.
class Blender {
 public:
  // An endless blend of 1 to 32,767 datasets.
  static Blender of_weights(const std::vector<double>& weights,
                            const Lanes& lanes = widest_lanes());

  // A blend of all samples, with sizes as weights. A dataset without remaining samples drops out.
  static Blender of_sizes(const std::vector<int64_t>& sizes, const Lanes& lanes = widest_lanes());

  // Writes dataset numbers and sample numbers of the next `count` samples.
  void draw(int64_t count, int16_t* dataset_index, int64_t* dataset_sample_index);

  // Remaining samples.
  int64_t left() const { return total_ - sample_; }

 private:
  // Classes that can lead before sample `end`. Pool 0 has all classes; each further pool is a
  // subset of its outer pool, the one before. The classes that it omits stay below the line bottom
  // + slope_ x sample until `end`. So a leader of the pool that is not below the line leads all
  // classes.
  struct Pool {
    std::vector<double> weights;
    std::vector<double> drawn;      // by the next member; infinite if no samples remain
    std::vector<uint32_t> classes;  // class numbers
    std::vector<uint32_t> parent;   // places in the outer pool
    size_t size = 0;
    int64_t block = 0;  // samples for which the pool is sized
    int64_t end = 0;
    bool dirty = false;  // `drawn` is newer than in the outer pool
    double bottom = -std::numeric_limits<double>::infinity();
    double depth = 0;  // distance of the line below recent leaders
  };

  struct Leader {
    size_t place;
    double lag;
  };

  explicit Blender(const Lanes& lanes) : lanes_(&lanes) {}
  void add_classes(const std::vector<double>& weights, const std::vector<int64_t>& sizes);
  void add_pools();
  void run(int64_t stop, int16_t*& dataset_index, int64_t*& dataset_sample_index);
  size_t next_member();
  void fill_pools();
  void fill_pool(size_t level);
  static void copy_classes(const Pool& outer, Pool& pool, size_t size);
  void write_back(size_t level);
  static Candidates candidates(Pool& pool);
  void follow_trend();
  bool leads_all(const Pool& pool, double lag) const;
  size_t search_outer_pools();
  void update_recent(double lowest, int64_t samples);
  Leader leader(size_t level);
  size_t take(size_t level, size_t place);
  double scale() const { return sample_ > 1 ? static_cast<double>(sample_) : 1.0; }

  const Lanes* lanes_;
  std::vector<uint32_t> members_;
  std::vector<BlendClass> classes_;
  std::vector<BlendTurn> turns_;  // by class
  std::vector<Pool> pools_;
  std::vector<uint32_t> leaders_;  // scratch: places of tied leaders
  int64_t sample_ = 0;
  int64_t total_ = 0;
  int64_t latest_sample_ = 0;
  double slope_ = 0;          // slope of the lines: growth of the leaders' lags per sample
  double recent_ = 0;         // smoothed lowest lag of recent leaders, minus slope_ x sample
  double trend_recent_ = 0;   // recent_ at the last update of slope_
  int64_t trend_sample_ = 0;  // sample of that update
};

}  // namespace tokamake
