// Builds the blend greedily. Each sample compares only the datasets that can lead.
#include "blend.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <tuple>

namespace tokamake {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kMaxSamples = int64_t{1} << 53;  // doubles hold larger integers only rounded

void check_number(size_t datasets) {
  constexpr size_t kMaxDatasets = std::numeric_limits<int16_t>::max();
  if (datasets < 1 || datasets > kMaxDatasets) {
    throw std::invalid_argument("a blend takes 1 to 32767 datasets");
  }
}

size_t padded(size_t size) { return (size + kGroup - 1) / kGroup * kGroup; }

}  // namespace

Blender Blender::of_weights(const std::vector<double>& weights, const Lanes& lanes) {
  check_number(weights.size());
  for (const double weight : weights) {
    if (!std::isfinite(weight) || weight < 0) {
      throw std::invalid_argument("weights are finite and not negative");
    }
  }
  Blender blender(lanes);
  blender.total_ = kMaxSamples;
  blender.add_classes(weights, std::vector<int64_t>(weights.size(), kMaxSamples));
  return blender;
}

Blender Blender::of_sizes(const std::vector<int64_t>& sizes, const Lanes& lanes) {
  check_number(sizes.size());
  Blender blender(lanes);
  for (const int64_t size : sizes) {
    if (size < 1) throw std::invalid_argument("sizes start at 1");
    if (size > kMaxSamples - blender.total_) {
      throw std::invalid_argument("sizes add up to more than 2**53");
    }
    blender.total_ += size;
  }
  std::vector<double> weights(sizes.size());
  std::transform(sizes.begin(), sizes.end(), weights.begin(), [&](int64_t size) {
    return static_cast<double>(size) / static_cast<double>(blender.total_);
  });
  blender.add_classes(weights, sizes);
  return blender;
}

// Datasets of equal weight form a class. The member with fewer drawn samples has a larger lag, by
// at least 1. Doubles resolve this difference while weight x sample is at most 2**53, so for
// weights up to 1. With larger weights each dataset is its own class, and all are compared at every
// sample.
void Blender::add_classes(const std::vector<double>& weights, const std::vector<int64_t>& sizes) {
  const bool exact = *std::max_element(weights.begin(), weights.end()) <= 1;
  members_.resize(weights.size());
  std::iota(members_.begin(), members_.end(), uint32_t{0});
  const auto key = [&](size_t i) { return std::make_tuple(weights[i], sizes[i]); };
  std::stable_sort(members_.begin(), members_.end(),
                   [&](uint32_t left, uint32_t right) { return key(left) < key(right); });
  pools_.emplace_back();
  Pool& all = pools_.front();
  for (size_t i = 0; i < members_.size(); ++i) {
    if (exact && i > 0 && key(members_[i]) == key(members_[i - 1])) {
      ++classes_.back().count;
      turns_.back().always = false;
      continue;
    }
    const int64_t size = sizes[members_[i]];
    all.classes.push_back(static_cast<uint32_t>(classes_.size()));
    turns_.push_back({members_[i], size == kMaxSamples, 0});
    classes_.push_back({i, 1, 0, size});
    all.weights.push_back(weights[members_[i]]);
  }
  all.size = classes_.size();
  all.drawn.assign(padded(all.size), kInfinity);
  std::fill_n(all.drawn.begin(), all.size, 0.0);
  all.weights.resize(padded(all.size), 0.0);
  leaders_.resize(padded(all.size) + kGroup);
  all.end = std::numeric_limits<int64_t>::max();
  if (exact) add_pools();
}

// Each pool serves 4 to 8 times fewer samples than its outer pool. A pool for b samples holds about
// b to 2 b classes, and the innermost so few that a run can compare them. A few dozen classes need
// no inner pool.
void Blender::add_pools() {
  const double mean = std::accumulate(pools_[0].weights.begin(), pools_[0].weights.end(), 0.0) /
                      static_cast<double>(classes_.size());
  for (const int64_t block : {3200, 400, 80, 20}) {
    if (static_cast<int64_t>(classes_.size()) * 3 <= block * 5) continue;
    Pool pool;
    const size_t room = pools_[0].weights.size() + kGroup;
    pool.weights.resize(room);
    pool.drawn.resize(room);
    pool.parent.resize(room);
    pool.classes.resize(room);
    pool.block = block;
    pool.depth = mean * static_cast<double>(block) + 1e-12;
    pools_.push_back(std::move(pool));
  }
}

void Blender::draw(int64_t count, int16_t* dataset_index, int64_t* dataset_sample_index) {
  if (count < 0 || count > left()) {
    throw std::invalid_argument("a blend has no more samples than its sizes add up to");
  }
  const int64_t stop = sample_ + count;
  while (sample_ < stop) {
    if (sample_ >= pools_.back().end) fill_pools();
    run(stop, dataset_index, dataset_sample_index);
    if (sample_ == stop || sample_ >= pools_.back().end) continue;
    *dataset_index++ = static_cast<int16_t>(next_member());
    *dataset_sample_index++ = latest_sample_;
    ++sample_;
  }
}

void Blender::run(int64_t stop, int16_t*& dataset_index, int64_t*& dataset_sample_index) {
  Pool& pool = pools_.back();
  if (pool.size == 0 || pool.size > kMaxRunClasses) return;
  BlendRun run{};
  run.candidates = candidates(pool);
  run.classes = pool.classes.data();
  run.turns = turns_.data();
  run.blend_classes = classes_.data();
  run.members = members_.data();
  run.bottom = pool.bottom;
  run.slope = slope_;
  run.sample = sample_;
  run.stop = std::min(stop, pool.end);
  run.datasets = dataset_index;
  run.samples = dataset_sample_index;
  run.lowest = kInfinity;
  lanes_->run(run);
  if (run.sample > sample_) update_recent(run.lowest, run.sample - sample_);
  sample_ = run.sample;
  dataset_index = run.datasets;
  dataset_sample_index = run.samples;
}

size_t Blender::next_member() {
  const size_t level = pools_.size() - 1;
  const Leader best = leader(level);
  if (!leads_all(pools_[level], best.lag)) return search_outer_pools();
  update_recent(best.lag - slope_ * scale(), 1);
  return take(level, best.place);
}

// Pool 0 omits no class: its bottom is -infinity.
bool Blender::leads_all(const Pool& pool, double lag) const {
  return lag >= pool.bottom + slope_ * scale();
}

// A class outside the innermost pool may lead: search the outer pools, one after the other.
size_t Blender::search_outer_pools() {
  size_t level = pools_.size() - 1;
  Leader best{};
  do {
    write_back(level);
    pools_[level].end = sample_;
    pools_[level].depth *= 1.25;
    best = leader(--level);
  } while (!leads_all(pools_[level], best.lag));
  // The inner pools have stale counts from here on: end them, so that they are filled again.
  for (size_t inner = level + 1; inner < pools_.size(); ++inner) pools_[inner].end = sample_;
  update_recent(best.lag - slope_ * scale(), 1);
  return take(level, best.place);
}

void Blender::update_recent(double lowest, int64_t samples) {
  const double part = std::min(1.0, static_cast<double>(samples) / 128);
  recent_ = lowest < recent_ ? lowest : recent_ + (lowest - recent_) * part;
}

void Blender::fill_pools() {
  size_t level = 1;
  while (sample_ < pools_[level].end) ++level;
  for (size_t inner = pools_.size() - 1; inner >= level; --inner) write_back(inner);
  if (level == 1) follow_trend();
  for (; level < pools_.size(); ++level) fill_pool(level);
}

// The lags of datasets with nearly equal weights rise together while they wait. So does the lag of
// the leader, and the lines follow it.
void Blender::follow_trend() {
  const auto samples = static_cast<double>(sample_ - trend_sample_);
  if (samples < 32) return;
  const double mean = 1 / static_cast<double>(classes_.size());
  const double rate = slope_ + (recent_ - trend_recent_) / samples;
  const double level = recent_ + slope_ * scale();
  // A steep fall is the end of a round, not a trend.
  if (rate > -mean / 4) slope_ = std::clamp(rate, 0.0, 1.0);
  recent_ = trend_recent_ = level - slope_ * scale();
  trend_sample_ = sample_;
}

// Proof that an omitted class cannot lead: while it is not drawn, its lag weight x sample - drawn
// is linear in the sample, and so is the pool's line. If the lag is below the line at the first and
// at the last sample of the pool, it is below the line in between.
//
// Rounding: doubles round weight x sample (at most `to`) and the difference (at most one larger) by
// 2**-53 of each. The same holds for the line, whose largest term may also be `bottom`. The margin
// is 32 times the sum of these errors. Depth and slope are guesses and only affect the speed.
void Blender::fill_pool(size_t level) {
  Pool& outer = pools_[level - 1];
  Pool& pool = pools_[level];
  // Short at the beginning: the trend of the leaders is not known yet.
  pool.end = std::min(sample_ + std::min(pool.block, 32 + sample_ / 8), outer.end);
  pool.bottom = std::max(recent_ - pool.depth, outer.bottom);
  const double from = scale();
  const double to = std::max(static_cast<double>(pool.end - 1), 1.0);
  const double bottom = pool.bottom - std::ldexp(2 * to + std::abs(pool.bottom) + 2, -48);
  const Reach reach{from, bottom + slope_ * from, to, bottom + slope_ * to};
  copy_classes(outer, pool, lanes_->gather(candidates(outer), reach, pool.parent.data()));
  // A leader below the line makes the next line deeper (search_outer_pools). Shrink slowly, so that
  // this stays rare: a few times in a hundred pools.
  const auto size = static_cast<int64_t>(pool.size);
  if (size > pool.block) pool.depth *= size > 3 * pool.block ? 0.5 : 0.97;
}

void Blender::copy_classes(const Pool& outer, Pool& pool, size_t size) {
  for (size_t place = 0; place < size; ++place) {
    pool.weights[place] = outer.weights[pool.parent[place]];
    pool.drawn[place] = outer.drawn[pool.parent[place]];
    pool.classes[place] = outer.classes[pool.parent[place]];
  }
  for (size_t place = size; place < padded(size); ++place) {
    pool.weights[place] = 0;
    pool.drawn[place] = kInfinity;
  }
  pool.size = size;
  pool.dirty = true;
}

// Writes the counts of a pool to its outer pool.
void Blender::write_back(size_t level) {
  Pool& pool = pools_[level];
  if (!pool.dirty) return;
  std::vector<double>& drawn = pools_[level - 1].drawn;
  for (size_t place = 0; place < pool.size; ++place) drawn[pool.parent[place]] = pool.drawn[place];
  pool.dirty = false;
}

Candidates Blender::candidates(Pool& pool) {
  return {pool.weights.data(), pool.drawn.data(), pool.size};
}

Blender::Leader Blender::leader(size_t level) {
  Pool& pool = pools_[level];
  const double lag = lanes_->lead(candidates(pool), scale());
  const Reach reach{scale(), lag, scale(), lag};
  const size_t size = lanes_->gather(candidates(pool), reach, leaders_.data());
  size_t best = leaders_[0];
  for (size_t i = 1; i < size; ++i) {
    const size_t place = leaders_[i];
    if (turns_[pool.classes[place]].dataset < turns_[pool.classes[best]].dataset) best = place;
  }
  return {best, lag};
}

// Draws from a class and returns the dataset; `latest_sample_` becomes the number of the sample.
size_t Blender::take(size_t level, size_t place) {
  const size_t number = pools_[level].classes[place];
  const size_t member = turns_[number].dataset;
  latest_sample_ = turns_[number].drawn;
  BlendClass& blend_class = classes_[number];
  blend_class.next = blend_class.next + 1 == blend_class.count ? 0 : blend_class.next + 1;
  turns_[number].dataset = members_[blend_class.first + blend_class.next];
  if (blend_class.next > 0) return member;  // `drawn` of the class counts whole rounds
  ++turns_[number].drawn;
  double& drawn = pools_[level].drawn[place];
  drawn = latest_sample_ + 1 == blend_class.size ? kInfinity : drawn + 1;
  return member;
}

}  // namespace tokamake
