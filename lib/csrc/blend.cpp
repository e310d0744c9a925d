// Builds the blend greedily, comparing at each sample only the datasets that can lead.
#include "blend.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <tuple>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace tokamake {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kMostSamples = int64_t{1} << 53;  // beyond it doubles do not count
constexpr size_t kLanes = 2;

void check_number(size_t datasets) {
  constexpr size_t kMost = std::numeric_limits<int16_t>::max();
  if (datasets < 1 || datasets > kMost) {
    throw std::invalid_argument("a blend takes 1 to 32767 datasets");
  }
}

size_t padded(size_t size) { return (size + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

// GCC and Clang make of these what the processor has; comparisons give -1 or 0 in each lane.
typedef double Doubles __attribute__((vector_size(kLanes * sizeof(double))));
typedef int64_t Integers __attribute__((vector_size(kLanes * sizeof(int64_t))));

Doubles load(const double* from) {
  Doubles loaded;
  std::memcpy(&loaded, from, sizeof(loaded));
  return loaded;
}

Doubles all_lanes(double value) { return Doubles{value, value}; }

// Adds 1 to one lane, but writes all of them: what is read next is all of them, and a processor
// hands over at once what it has just written only if it was written in one piece.
void add_one(double* lanes, size_t lane) {
  static constexpr double kOnes[] = {0, 1, 0};
  const Doubles sum = load(lanes) + load(kOnes + kLanes - 1 - lane);
  std::memcpy(lanes, &sum, sizeof(sum));
}

Doubles larger(Doubles left, Doubles right) {
#ifdef __SSE2__
  return _mm_max_pd(left, right);  // GCC 12 makes three instructions of the other
#else
  return left > right ? left : right;
#endif
}

}  // namespace

Blender Blender::of_weights(const std::vector<double>& weights) {
  check_number(weights.size());
  for (const double weight : weights) {
    if (!std::isfinite(weight) || weight < 0) {
      throw std::invalid_argument("weights are finite and not negative");
    }
  }
  Blender blender;
  blender.last_ = kMostSamples;
  blender.add_classes(weights, std::vector<int64_t>(weights.size(), kMostSamples));
  return blender;
}

Blender Blender::of_sizes(const std::vector<int64_t>& sizes) {
  check_number(sizes.size());
  Blender blender;
  for (const int64_t size : sizes) {
    if (size < 1) throw std::invalid_argument("sizes start at 1");
    if (size > kMostSamples - blender.last_) {
      throw std::invalid_argument("sizes add up to more than 2**53");
    }
    blender.last_ += size;
  }
  std::vector<double> weights(sizes.size());
  std::transform(sizes.begin(), sizes.end(), weights.begin(), [&](int64_t size) {
    return static_cast<double>(size) / static_cast<double>(blender.last_);
  });
  blender.add_classes(weights, sizes);
  return blender;
}

// Of two datasets of one weight the one that gave less lags more, by one or more. Doubles tell them
// apart while weight x sample is at most 2**53, which a weight of 1 or less makes sure of; beyond
// it each dataset is a class of its own, and all are compared at every sample.
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
    const int64_t most = sizes[members_[i]];
    all.classes.push_back(static_cast<uint32_t>(classes_.size()));
    turns_.push_back({members_[i], most == kMostSamples});
    classes_.push_back({i, 1, 0, most});
    all.weights.push_back(weights[members_[i]]);
  }
  all.size = classes_.size();
  all.drawn.assign(padded(all.size), kInfinity);
  std::fill_n(all.drawn.begin(), all.size, 0.0);
  all.weights.resize(padded(all.size), 0.0);
  all.end = std::numeric_limits<int64_t>::max();
  if (exact) add_pools();
}

// Each pool is filled for some 8 times fewer samples than the one before; a pool of b samples holds
// some b to 2 b classes.
void Blender::add_pools() {
  const double mean = std::accumulate(pools_[0].weights.begin(), pools_[0].weights.end(), 0.0) /
                      static_cast<double>(classes_.size());
  for (const int64_t block : {4096, 512, 64, 16}) {
    if (static_cast<int64_t>(classes_.size()) < 4 * block) continue;
    Pool pool;
    const size_t room = pools_[0].weights.size() + kLanes;
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
  for (int64_t i = 0; i < count; ++i) {
    dataset_index[i] = static_cast<int16_t>(next_member());
    dataset_sample_index[i] = drawn_of_latest_;
    ++sample_;
  }
}

size_t Blender::next_member() {
  if (sample_ >= pools_.back().end) fill_pools();
  const size_t level = pools_.size() - 1;
  const Leader found = leader(level);
  if (!leads_all(pools_[level], found.lag)) return look_wider();
  note(found.lag);
  return take(level, found.place);
}

// The line lies at `bottom` + slope_ x sample; pool 0 leaves nobody out, its line is nowhere.
bool Blender::leads_all(const Pool& pool, double lag) const {
  return lag >= pool.bottom + slope_ * scale();
}

// Somebody outside the innermost pool may lead: look in the pool around it, and so on outwards.
size_t Blender::look_wider() {
  size_t level = pools_.size() - 1;
  Leader found{};
  do {
    pools_[level].end = sample_;
    pools_[level].depth *= 1.25;
    found = leader(--level);
  } while (!leads_all(pools_[level], found.lag));
  // The pools inside hold stale counts from here on; all of them have ended.
  for (size_t inner = level + 1; inner < pools_.size(); ++inner) pools_[inner].end = sample_;
  note(found.lag);
  return take(level, found.place);
}

void Blender::note(double lag) {
  const double above = lag - slope_ * scale();
  recent_ = above < recent_ ? above : recent_ + (above - recent_) / 128;
}

void Blender::fill_pools() {
  size_t level = 1;
  while (sample_ < pools_[level].end) ++level;
  if (level == 1) follow_trend();
  for (; level < pools_.size(); ++level) fill_pool(level);
}

// Datasets of nearly one weight rise together while they wait, and so does the leader.
void Blender::follow_trend() {
  const auto samples = static_cast<double>(sample_ - trend_sample_);
  if (samples < 32) return;
  const double mean = 1 / static_cast<double>(classes_.size());
  const double rate = slope_ + (recent_ - trend_recent_) / samples;
  const double level = recent_ + slope_ * scale();
  if (rate > -mean / 4) slope_ = std::clamp(rate, 0.0, 1.0);  // else a round is over: no trend
  recent_ = trend_recent_ = level - slope_ * scale();
  trend_sample_ = sample_;
}

// Why whoever is left out cannot lead: its lag, weight x sample - drawn, is a straight line while
// it is not drawn from, and so is the pool's. If the weight is less than the pool's slope, the lag
// is nearest to the pool's line at the pool's first sample, else at its last one; below it there is
// below it throughout. Doubles round weight x sample, at most `to`, and what is then subtracted, at
// most as large but for a sample, by 2**-53 of each; the same goes for the pool's line, whose
// largest part may also be `bottom`. The margin is 32 times as much. How good the guesses of depth
// and slope are matters for speed only.
void Blender::fill_pool(size_t level) {
  const Pool& outer = pools_[level - 1];
  Pool& pool = pools_[level];
  // Short at first, for what leaders will do is not known yet.
  pool.end = std::min(sample_ + std::min(pool.block, 32 + sample_ / 8), outer.end);
  pool.bottom = std::max(recent_ - pool.depth, outer.bottom);
  const double from = scale();
  const double to = std::max(static_cast<double>(pool.end - 1), 1.0);
  const double bottom = pool.bottom - std::ldexp(2 * to + std::abs(pool.bottom) + 2, -48);
  // Classes are in the order of their weights, in all pools. The lanes in which the slope lies are
  // kept unseen.
  const auto first = outer.weights.begin();
  const auto split = static_cast<size_t>(
      std::lower_bound(first, first + static_cast<int64_t>(outer.size), slope_) - first);
  const size_t middle = split / kLanes * kLanes;
  size_t size = gather(outer, 0, middle, from, bottom + slope_ * from, pool.parent.data());
  for (size_t place = middle; place < std::min(middle + kLanes, outer.size); ++place) {
    pool.parent[size++] = static_cast<uint32_t>(place);
  }
  size += gather(outer, middle + kLanes, outer.size, to, bottom + slope_ * to,
                 pool.parent.data() + size);
  copy_classes(outer, pool, size);
  if (static_cast<int64_t>(size) > 2 * pool.block) pool.depth *= 0.97;
}

// Writes the places, from `start` on, of classes that reach `least` at the sample; tells how many.
size_t Blender::gather(const Pool& pool, size_t start, size_t stop, double sample, double least,
                       uint32_t* places) {
  const double* weights = pool.weights.data();
  const double* drawn = pool.drawn.data();
  size_t size = 0;
  for (; start < stop; start += kLanes) {
    const Integers reached =
        load(weights + start) * all_lanes(sample) - load(drawn + start) >= all_lanes(least);
    for (size_t lane = 0; lane < kLanes; ++lane) {  // without a branch: it would be a coin's toss
      places[size] = static_cast<uint32_t>(start + lane);
      size -= static_cast<size_t>(reached[lane]);
    }
  }
  return size;
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
}

Blender::Leader Blender::leader(size_t level) const {
  const Pool& pool = pools_[level];
  const double* weights = pool.weights.data();
  const double* drawn = pool.drawn.data();
  const Doubles now = all_lanes(scale());
  Doubles even = all_lanes(-kInfinity);
  Doubles odd = even;
  for (size_t start = 0; start < pool.size; start += 2 * kLanes) {
    even = larger(load(weights + start) * now - load(drawn + start), even);
    odd = larger(load(weights + start + kLanes) * now - load(drawn + start + kLanes), odd);
  }
  const Doubles most = larger(even, odd);
  const double lag = std::max(most[0], most[1]);
  Integers place{0, 1};
  Integers found{};
  Integers leaders{};
  for (size_t start = 0; start < pool.size; start += kLanes, place += kLanes) {
    const Integers leads = load(weights + start) * now - load(drawn + start) == all_lanes(lag);
    found |= leads & place;
    leaders -= leads;
  }
  if (leaders[0] + leaders[1] != 1) return {lowest_of_equal(level, lag), lag};
  return {static_cast<size_t>(found[0] | found[1]), lag};
}

size_t Blender::lowest_of_equal(size_t level, double lag) const {
  const Pool& pool = pools_[level];
  size_t found = 0;
  size_t lowest = members_.size();
  for (size_t place = 0; place < pool.size; ++place) {
    if (pool.weights[place] * scale() - pool.drawn[place] != lag) continue;
    const size_t member = turns_[pool.classes[place]].dataset;
    if (member < lowest) {
      lowest = member;
      found = place;
    }
  }
  return found;
}

// Draws from the class and returns the dataset; `drawn_of_latest_` is the sample.
size_t Blender::take(size_t level, size_t place) {
  const size_t number = pools_[level].classes[place];
  const size_t member = turns_[number].dataset;
  drawn_of_latest_ = static_cast<int64_t>(pools_[level].drawn[place]);
  if (turns_[number].always) {
    add_round(level, place);
    return member;
  }
  Class& one = classes_[number];
  one.next = one.next + 1 == one.count ? 0 : one.next + 1;
  turns_[number].dataset = members_[one.first + one.next];
  if (one.next > 0) return member;
  add_round(level, place);
  if (drawn_of_latest_ + 1 == one.most) use_up(level, place);
  return member;
}

void Blender::add_round(size_t level, size_t place) {
  for (;; --level) {
    add_one(&pools_[level].drawn[place / kLanes * kLanes], place % kLanes);
    if (level == 0) return;
    place = pools_[level].parent[place];
  }
}

void Blender::use_up(size_t level, size_t place) {
  for (;; --level) {
    pools_[level].drawn[place] = kInfinity;
    if (level == 0) return;
    place = pools_[level].parent[place];
  }
}

}  // namespace tokamake
