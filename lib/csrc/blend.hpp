// Blend: which dataset, and which of its samples, each sample of a mixture is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "lanes.hpp"

namespace tokamake {

// Sample i goes to the dataset that lags most behind its share: weight x max(i, 1) - drawn, all in
// doubles; the lowest number wins a tie. Weights are normalized by the caller and used as they are.
//
// Datasets of one weight take turns by number, so they are compared once for all, as one class. Of
// the classes only those are compared that can lead soon: see Pool. For some samples on end they
// are compared by vectors: see BlendRun, which stops where more is to be done.
class Blender {
 public:
  // Never ends. Throws std::invalid_argument if there is no weight, more than int16 can number, or
  // a weight that is negative or not finite.
  static Blender of_weights(const std::vector<double>& weights,
                            const Lanes& lanes = widest_lanes());

  // Gives each dataset exactly its size and weighs by size; a dataset that is used up takes no more
  // part. Throws std::invalid_argument if there is no size, more than int16 can number, one below
  // 1, or their sum is above 2**53.
  static Blender of_sizes(const std::vector<int64_t>& sizes, const Lanes& lanes = widest_lanes());

  // Writes the next `count` samples: the dataset's number, and the sample's number in it. Throws
  // std::invalid_argument if sizes allow for fewer.
  void draw(int64_t count, int16_t* dataset_index, int64_t* dataset_sample_index);

  // Samples not drawn yet.
  int64_t left() const { return last_ - sample_; }

 private:
  // Classes that can lead before sample `end`, all of them in pool 0. Those that the pool leaves
  // out of the one before it lie below a line, bottom + slope_ x sample, from when the pool was
  // filled to its end; so whoever leads the pool and is not below the line leads all.
  struct Pool {
    std::vector<double> weights;
    std::vector<double> drawn;      // by the next member; infinite when the class is used up
    std::vector<uint32_t> classes;  // their numbers
    std::vector<uint32_t> parent;   // their places in the pool before
    size_t size = 0;
    int64_t block = 0;  // samples that a pool is meant for
    int64_t end = 0;
    bool ahead = false;  // of the pool before: what was drawn is still to be written there
    double bottom = -std::numeric_limits<double>::infinity();
    double depth = 0;  // how far below the leaders of late the line is drawn
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
  void close(size_t level);
  static Candidates candidates(Pool& pool);
  void follow_trend();
  bool leads_all(const Pool& pool, double lag) const;
  size_t look_wider();
  void note(double lowest, int64_t samples);
  Leader leader(size_t level);
  size_t take(size_t level, size_t place);
  double scale() const { return sample_ > 1 ? static_cast<double>(sample_) : 1.0; }

  const Lanes* lanes_;
  std::vector<uint32_t> members_;
  std::vector<BlendClass> classes_;
  std::vector<BlendTurn> turns_;  // of each class
  std::vector<Pool> pools_;
  std::vector<uint32_t> leaders_;  // places, for a moment
  int64_t sample_ = 0;
  int64_t last_ = 0;
  int64_t drawn_of_latest_ = 0;
  double slope_ = 0;          // of the lines: by how much leaders' lags grow with each sample
  double recent_ = 0;         // lowest leader of late, above slope_ x sample
  double trend_recent_ = 0;   // the same when slope_ was looked at last
  int64_t trend_sample_ = 0;  // when that was
};

}  // namespace tokamake
