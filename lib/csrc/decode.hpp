// Operations between the matrix products of a Llama layer, for one new token of each sequence. As
// single operations of torch, they would take longer to begin than to run.
#pragma once

#include <cstdint>

namespace tokamake {

struct AttentionShape {
  int64_t rows;    // sequences
  int64_t heads;   // query heads
  int64_t groups;  // key and value heads
  int64_t width;   // of a head, even
};

// Keys and values of earlier tokens, contiguous for each row and group.
struct CacheView {
  float* keys;
  float* values;
  int64_t row_stride;
  int64_t group_stride;
};

// Adds `update`, unless it is null, to `states` (rows, width); writes their RMS norms to `normed`.
void add_rms_norm(float* states, const float* update, const float* weight, float eps, int64_t rows,
                  int64_t width, float* normed);

// Rotates queries and keys, appends keys and values to the cache, and attends to all in it.
// `projected` (rows, (heads + 2 groups) width): queries, keys, values. `cosines` and `sines`
// (rows, width). `lengths` (rows): tokens of the cache before. Writes (rows, heads width).
void attend(const float* projected, const float* cosines, const float* sines,
            const CacheView& cache, const int64_t* lengths, const AttentionShape& shape,
            float* mixed);

// Writes silu(gate) up (rows, width) of `projected` (rows, 2 width): gate, up.
void gate(const float* projected, int64_t rows, int64_t width, float* gated);

}  // namespace tokamake
