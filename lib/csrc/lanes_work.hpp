// The operations of lanes.hpp for a class `Vector`, which the including file defines.
//
// The including files are compiled for different processors. So this code has internal linkage and
// calls no inline function of the standard library: the linker would keep one copy for all files,
// possibly with instructions that the processor lacks.
#pragma once

#include "lanes.hpp"

namespace tokamake {
namespace {

constexpr size_t kVectorsOfGroup = kGroup / Vector::kLanes;

Vector lag(const Candidates& candidates, size_t place, Vector sample) {
  return Vector::load(candidates.weights + place) * sample - Vector::load(candidates.drawn + place);
}

uint32_t lowest_dataset(const BlendRun& run, uint64_t leaders) {
  uint32_t lowest_place = 0;
  uint32_t lowest = UINT32_MAX;
  for (; leaders != 0; leaders &= leaders - 1) {
    const auto place = static_cast<uint32_t>(__builtin_ctzll(leaders));
    const uint32_t dataset = run.turns[run.classes[place]].dataset;
    if (dataset < lowest) {
      lowest = dataset;
      lowest_place = place;
    }
  }
  return lowest_place;
}

bool is_last(const BlendRun& run, uint32_t number) {
  const BlendClass& blend_class = run.blend_classes[number];
  return blend_class.next + 1 == blend_class.count &&
         run.turns[number].drawn + 1 == blend_class.size;
}

// Passes the turn to the next member. Returns whether all members had their turn.
bool ends_round(const BlendRun& run, uint32_t number) {
  BlendClass& blend_class = run.blend_classes[number];
  blend_class.next = blend_class.next + 1 == blend_class.count ? 0 : blend_class.next + 1;
  run.turns[number].dataset = run.members[blend_class.first + blend_class.next];
  return blend_class.next == 0;
}

template <size_t kVectors>
Vector largest_of(const Vector (&values)[kVectors]) {
  Vector even = values[0];
  Vector odd = values[kVectors > 1 ? 1 : 0];  // two chains of maxima: shorter dependencies
  for (size_t i = 2; i < kVectors; i += 2) even = larger(even, values[i]);
  for (size_t i = 3; i < kVectors; i += 2) odd = larger(odd, values[i]);
  return in_all_lanes(larger(even, odd));
}

template <size_t kVectors>
void load_all(const double* from, Vector (&to)[kVectors]) {
  for (size_t i = 0; i < kVectors; ++i) to[i] = Vector::load(from + i * Vector::kLanes);
}

template <size_t kVectors>
void store_all(const Vector (&from)[kVectors], double* to) {
  for (size_t i = 0; i < kVectors; ++i) store(to + i * Vector::kLanes, from[i]);
}

template <size_t kVectors>
uint64_t find(const Vector (&lags)[kVectors], Vector most, Mask (&leads)[kVectors]) {
  uint64_t leaders = 0;
  for (size_t i = 0; i < kVectors; ++i) {
    leads[i] = equal(lags[i], most);
    leaders |= uint64_t{bits(leads[i])} << (i * Vector::kLanes);
  }
  return leaders;
}

// Each sample depends on the counts of the one before. To shorten this chain, the counts stay in
// registers, and the mask of the leaders increments them directly; the place of the leader and the
// output are computed in parallel.
template <size_t kVectors>
void draw_run(BlendRun& run) {
  const Candidates candidates = run.candidates;
  const double bottom = run.bottom;
  const double slope = run.slope;
  const int64_t stop = run.stop;
  int64_t sample = run.sample;
  int16_t* const datasets = run.datasets - sample;
  int64_t* const samples = run.samples - sample;
  double lowest = run.lowest;
  Vector drawn[kVectors];
  Vector lags[kVectors];
  Mask leads[kVectors];
  load_all(candidates.drawn, drawn);
  for (; sample < stop; ++sample) {
    const double scale = sample > 1 ? static_cast<double>(sample) : 1.0;
    const Vector now = Vector::all(scale);
    for (size_t i = 0; i < kVectors; ++i) {
      lags[i] = Vector::load(candidates.weights + i * Vector::kLanes) * now - drawn[i];
    }
    const Vector most = largest_of(lags);
    const double line = slope * scale;
    if (!(first(most) >= bottom + line)) break;
    const uint64_t leaders = find(lags, most, leads);
    const bool tie = (leaders & (leaders - 1)) != 0;
    const auto place =
        tie ? lowest_dataset(run, leaders) : static_cast<uint32_t>(__builtin_ctzll(leaders));
    const uint32_t number = run.classes[place];
    BlendTurn& turn = run.turns[number];
    if (!turn.always && is_last(run, number)) break;
    lowest = first(most) - line < lowest ? first(most) - line : lowest;
    datasets[sample] = static_cast<int16_t>(turn.dataset);
    samples[sample] = turn.drawn;
    if (!turn.always && !ends_round(run, number)) continue;
    ++turn.drawn;
    if (tie) {  // the mask has all leaders, but only one is drawn
      store_all(drawn, candidates.drawn);
      candidates.drawn[place] += 1;
      load_all(candidates.drawn, drawn);
    } else {
      for (size_t i = 0; i < kVectors; ++i) drawn[i] = add_one(drawn[i], leads[i]);
    }
  }
  store_all(drawn, candidates.drawn);
  run.datasets = datasets + sample;
  run.samples = samples + sample;
  run.sample = sample;
  run.lowest = lowest;
}

void draw_any(BlendRun& run) {
  constexpr size_t kOne = kVectorsOfGroup;
  constexpr void (*kRuns[])(BlendRun&) = {
      draw_run<kOne>,     draw_run<2 * kOne>, draw_run<3 * kOne>, draw_run<4 * kOne>,
      draw_run<5 * kOne>, draw_run<6 * kOne>, draw_run<7 * kOne>, draw_run<8 * kOne>};
  static_assert(sizeof(kRuns) / sizeof(kRuns[0]) * kGroup == kMaxRunClasses, "a run for each size");
  kRuns[(run.candidates.size - 1) / kGroup](run);
}

size_t gather(Candidates candidates, Reach reach, uint32_t* places) {
  const Vector from = Vector::all(reach.first_sample);
  const Vector least_from = Vector::all(reach.first_lag);
  const Vector to = Vector::all(reach.last_sample);
  const Vector least_to = Vector::all(reach.last_lag);
  size_t size = 0;
  for (size_t start = 0; start < candidates.size; start += kGroup) {
    uint32_t reached = 0;
    for (size_t i = 0; i < kGroup; i += Vector::kLanes) {
      reached |= (bits(at_least(lag(candidates, start + i, from), least_from)) |
                  bits(at_least(lag(candidates, start + i, to), least_to)))
                 << i;
    }
    size += write_places(reached, static_cast<uint32_t>(start), places + size);
  }
  return size;
}

double lead(Candidates candidates, double sample) {
  const Vector now = Vector::all(sample);
  Vector most[kVectorsOfGroup];
  for (Vector& vector : most) vector = Vector::all(-__builtin_inf());
  for (size_t start = 0; start < candidates.size; start += kGroup) {
    for (size_t i = 0; i < kVectorsOfGroup; ++i) {
      most[i] = larger(lag(candidates, start + i * Vector::kLanes, now), most[i]);
    }
  }
  return first(largest_of(most));
}

}  // namespace
}  // namespace tokamake
