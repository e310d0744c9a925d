// Vectors of four doubles, for x86 processors with AVX2. Only this file is compiled with -mavx2.
#include <immintrin.h>

#include "lanes.hpp"

namespace tokamake {
namespace {

using Mask = __m256d;

struct Vector {
  static constexpr size_t kLanes = 4;

  static Vector load(const double* from) { return {_mm256_loadu_pd(from)}; }
  static Vector all(double value) { return {_mm256_set1_pd(value)}; }

  __m256d lanes;
};

Vector operator*(Vector left, Vector right) { return {_mm256_mul_pd(left.lanes, right.lanes)}; }
Vector operator-(Vector left, Vector right) { return {_mm256_sub_pd(left.lanes, right.lanes)}; }
Vector larger(Vector left, Vector right) { return {_mm256_max_pd(left.lanes, right.lanes)}; }
double first(Vector value) { return _mm256_cvtsd_f64(value.lanes); }
void store(double* to, Vector value) { _mm256_storeu_pd(to, value.lanes); }
uint32_t bits(Mask mask) { return static_cast<uint32_t>(_mm256_movemask_pd(mask)); }

Mask equal(Vector left, Vector right) { return _mm256_cmp_pd(left.lanes, right.lanes, _CMP_EQ_OQ); }

Mask at_least(Vector left, Vector right) {
  return _mm256_cmp_pd(left.lanes, right.lanes, _CMP_GE_OQ);
}

Vector in_all_lanes(Vector value) {
  const Vector halves = larger(value, {_mm256_permute2f128_pd(value.lanes, value.lanes, 1)});
  return larger(halves, {_mm256_permute_pd(halves.lanes, 5)});
}

Vector add_one(Vector value, Mask mask) {
  return {_mm256_add_pd(value.lanes, _mm256_and_pd(mask, _mm256_set1_pd(1)))};
}

struct Table {
  uint64_t packed[1 << kGroup];  // for each bit mask: the places of its bits, a byte each
};

constexpr Table places_of_bits() {
  Table table{};
  for (uint32_t mask = 0; mask < 1 << kGroup; ++mask) {
    uint32_t size = 0;
    for (uint64_t lane = 0; lane < kGroup; ++lane) {
      if (mask >> lane & 1) table.packed[mask] |= lane << (8 * size++);
    }
  }
  return table;
}

constexpr Table kPlacesOfBits = places_of_bits();

size_t write_places(uint32_t bits, uint32_t start, uint32_t* places) {
  const auto packed = static_cast<int64_t>(kPlacesOfBits.packed[bits]);
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(packed));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(places),
                      _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(start))));
  return static_cast<size_t>(__builtin_popcount(bits));
}

}  // namespace
}  // namespace tokamake

#include "lanes_work.hpp"

namespace tokamake {

extern const Lanes kLanesOf256Bits;  // without the declaration a constant has internal linkage
const Lanes kLanesOf256Bits = {draw_any, gather, lead};

}  // namespace tokamake
