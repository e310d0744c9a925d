// The blend without vectors: for each sample, a loop over the pool finds the leader.
// blending.py --beside pool compiles it with lib/csrc/blend.cpp.
#include <algorithm>
#include <limits>

#include "blend.hpp"

namespace {

double lag(const tokamake::Candidates& candidates, size_t place, double sample) {
  return candidates.weights[place] * sample - candidates.drawn[place];
}

// Leaves classes with several members or an end to the blend.
void run(tokamake::BlendRun& run) {
  for (; run.sample < run.stop; ++run.sample) {
    const double scale = run.sample > 1 ? static_cast<double>(run.sample) : 1.0;
    double most = -std::numeric_limits<double>::infinity();
    size_t leader = 0;
    for (size_t place = 0; place < run.candidates.size; ++place) {
      const double own = lag(run.candidates, place, scale);
      const auto dataset = [&](size_t of) { return run.turns[run.classes[of]].dataset; };
      if (own > most || (own == most && dataset(place) < dataset(leader))) {
        most = own;
        leader = place;
      }
    }
    const double line = run.slope * scale;
    tokamake::BlendTurn& turn = run.turns[run.classes[leader]];
    if (!(most >= run.bottom + line) || !turn.always) return;
    run.lowest = std::min(run.lowest, most - line);
    *run.datasets++ = static_cast<int16_t>(turn.dataset);
    *run.samples++ = turn.drawn++;
    run.candidates.drawn[leader] += 1;
  }
}

size_t gather(tokamake::Candidates candidates, tokamake::Reach reach, uint32_t* places) {
  size_t size = 0;
  for (size_t place = 0; place < candidates.size; ++place) {
    places[size] = static_cast<uint32_t>(place);
    size += lag(candidates, place, reach.first_sample) >= reach.first_lag ||
            lag(candidates, place, reach.last_sample) >= reach.last_lag;
  }
  return size;
}

double lead(tokamake::Candidates candidates, double sample) {
  double most = -std::numeric_limits<double>::infinity();
  for (size_t place = 0; place < candidates.size; ++place) {
    most = std::max(most, lag(candidates, place, sample));
  }
  return most;
}

constexpr tokamake::Lanes kNoLanes = {run, gather, lead};

}  // namespace

extern "C" void draw(const double* weights, int64_t sets, int64_t size, int16_t* datasets,
                     int64_t* samples) {
  tokamake::Blender::of_weights({weights, weights + sets}, kNoLanes).draw(size, datasets, samples);
}
