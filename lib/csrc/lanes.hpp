// Vector operations of the blend, for each vector width of a processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokamake {

// Datasets of equal weight and size. `next` is the member whose turn it is.
struct BlendClass {
  size_t first;  // position in the list of members
  size_t count;
  size_t next;
  int64_t size;  // samples of each member
};

struct BlendTurn {
  uint32_t dataset;  // next member of the class
  bool always;       // the class has one member, without end
  int64_t drawn;     // samples of this member
};

// Arrays of candidates are padded to a multiple of this, with weight 0 and infinite `drawn`.
constexpr size_t kGroup = 8;

// Classes to compare. The lag of a class is weight x max(sample, 1) - drawn.
struct Candidates {
  const double* weights;
  double* drawn;
  size_t size;
};

// Maximum number of candidates of a run: there is code for each number of groups.
constexpr size_t kMaxRunClasses = 8 * kGroup;

// Draws consecutive samples from the same candidates.
struct BlendRun {
  Candidates candidates;
  const uint32_t* classes;  // by candidate
  BlendTurn* turns;         // by class
  BlendClass* blend_classes;
  const uint32_t* members;
  double bottom;  // leaders must not be below the line bottom + slope x max(sample, 1)
  double slope;
  int64_t sample;
  int64_t stop;
  int16_t* datasets;  // output: next position
  int64_t* samples;
  double lowest;  // output: lowest lag of a leader, minus slope x max(sample, 1)
};

// A candidate is within reach if its lag at one of two samples is at least the lag given here.
struct Reach {
  double first_sample;
  double first_lag;
  double last_sample;
  double last_lag;
};

// All widths give the same bits: each lane computes the same scalar operations.
struct Lanes {
  // Draws samples up to `stop`. Stops earlier before a leader that is below the line, or whose
  // class has only one sample left. Advances `sample`, `datasets` and `samples`.
  void (*run)(BlendRun&);

  // Writes the places of the candidates within reach, ascending, and up to kGroup words of garbage
  // after them. Returns the number of places.
  size_t (*gather)(Candidates, Reach, uint32_t* places);

  // Returns the lag of the leader.
  double (*lead)(Candidates, double sample);
};

extern const Lanes kLanesOf128Bits;

// Widest vectors of this processor.
const Lanes& widest_lanes();

}  // namespace tokamake
