// What the blend does with many candidates at once, by vectors of the width that a processor has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokamake {

// Datasets of one weight and size; `next` is the one of them whose turn it is.
struct BlendClass {
  size_t first;  // in the list of members
  size_t count;
  size_t next;
  int64_t most;  // samples that each of them has
};

struct BlendTurn {
  uint32_t dataset;  // the next one of the class
  bool always;       // it is the only one, and has no end
  int64_t given;     // samples that it gave
};

// Arrays of candidates are filled up to a multiple of this: by weight 0 and `drawn` infinite.
constexpr size_t kGroup = 8;

// Classes that are compared: one lags by weight x max(sample, 1) - drawn.
struct Candidates {
  const double* weights;
  double* drawn;
  size_t size;
};

// Most candidates that a run takes: it has code for each number of groups.
constexpr size_t kMostOfRun = 8 * kGroup;

// Consecutive samples out of the same candidates.
struct BlendRun {
  Candidates candidates;
  const uint32_t* classes;  // of each candidate
  BlendTurn* turns;         // of each class
  BlendClass* sharing;      // each class
  const uint32_t* members;
  double bottom;  // who leads is not below the line bottom + slope x max(sample, 1)
  double slope;
  int64_t sample;
  int64_t stop;
  int16_t* datasets;  // where the next samples are written
  int64_t* samples;
  double lowest;  // lag of a leader less slope x max(sample, 1)
};

// Two samples, and how much a candidate lags at one of them at least.
struct Reach {
  double first_sample;
  double first_lag;
  double last_sample;
  double last_lag;
};

// Whatever the width, the doubles are computed one by one as ever: all give the same bits.
struct Lanes {
  // Draws samples up to `stop`, or until one is not for a run to draw: its leader lies below the
  // line, or gives its last sample. Moves `sample`, `datasets` and `samples` on.
  void (*run)(BlendRun&);

  // Writes the places of candidates that lag so much at either sample, ascending, and up to kGroup
  // words that mean nothing; returns the number of places.
  size_t (*gather)(Candidates, Reach, uint32_t* places);

  // How much the leader lags.
  double (*lead)(Candidates, double sample);
};

extern const Lanes kLanesOf128Bits;

// The widest that this processor has.
const Lanes& widest_lanes();

}  // namespace tokamake
