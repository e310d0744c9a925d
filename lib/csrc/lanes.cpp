// Vectors of two doubles. GCC and Clang compile them for every processor.
#include "lanes.hpp"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace tokamake {
namespace {

typedef double Doubles __attribute__((vector_size(16)));
typedef int64_t Mask __attribute__((vector_size(16)));  // -1 or 0 in each lane

struct Vector {
  static constexpr size_t kLanes = 2;

  static Vector load(const double* from) {
    Vector loaded;
    __builtin_memcpy(&loaded, from, sizeof(loaded));
    return loaded;
  }

  static Vector all(double value) { return {Doubles{value, value}}; }

  Doubles lanes;
};

Vector operator*(Vector left, Vector right) { return {left.lanes * right.lanes}; }
Vector operator-(Vector left, Vector right) { return {left.lanes - right.lanes}; }
Mask equal(Vector left, Vector right) { return left.lanes == right.lanes; }
Mask at_least(Vector left, Vector right) { return left.lanes >= right.lanes; }
double first(Vector value) { return value.lanes[0]; }
void store(double* to, Vector value) { __builtin_memcpy(to, &value, sizeof(value)); }

Vector larger(Vector left, Vector right) {
#ifdef __SSE2__
  // GCC 12 compiles the ternary to three instructions.
  return {_mm_max_pd(left.lanes, right.lanes)};
#else
  return {left.lanes > right.lanes ? left.lanes : right.lanes};
#endif
}

Vector in_all_lanes(Vector value) {
  return larger(value, {Doubles{value.lanes[1], value.lanes[0]}});
}

uint32_t bits(Mask mask) {
#ifdef __SSE2__
  return static_cast<uint32_t>(_mm_movemask_pd(reinterpret_cast<__m128d>(mask)));
#else
  return static_cast<uint32_t>((mask[0] & 1) | (mask[1] & 2));
#endif
}

Vector add_one(Vector value, Mask mask) {
  return {value.lanes + reinterpret_cast<Doubles>(mask & reinterpret_cast<Mask>(Doubles{1, 1}))};
}

size_t write_places(uint32_t bits, uint32_t start, uint32_t* places) {
  size_t size = 0;
  for (uint32_t lane = 0; lane < kGroup; ++lane) {  // no branch: it would be unpredictable
    places[size] = start + lane;
    size += bits >> lane & 1;
  }
  return size;
}

}  // namespace
}  // namespace tokamake

#include "lanes_work.hpp"

namespace tokamake {

const Lanes kLanesOf128Bits = {draw_any, gather, lead};

#ifdef __x86_64__
extern const Lanes kLanesOf256Bits;

const Lanes& widest_lanes() {
  return __builtin_cpu_supports("avx2") ? kLanesOf256Bits : kLanesOf128Bits;
}
#else
const Lanes& widest_lanes() { return kLanesOf128Bits; }
#endif

}  // namespace tokamake
