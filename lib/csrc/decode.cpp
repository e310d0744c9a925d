#include "decode.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

// Each function is compiled for several processors; the loader takes the best one.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define TOKAMAKE_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TOKAMAKE_CLONES
#endif

namespace tokamake {
namespace {

// Inlined into the clones, so that they get their instructions.
inline __attribute__((always_inline)) float dot(const float* left, const float* right,
                                                int64_t size) {
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += left[i] * right[i];
  return sum;
}

inline __attribute__((always_inline)) void rotate(const float* from, const float* cosines,
                                                  const float* sines, int64_t width, float* to) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    to[i] = from[i] * cosines[i] - from[i + half] * sines[i];
    to[i + half] = from[i + half] * cosines[i] + from[i] * sines[i];
  }
}

}  // namespace

TOKAMAKE_CLONES
void add_rms_norm(float* states, const float* update, const float* weight, float eps, int64_t rows,
                  int64_t width, float* normed) {
  for (int64_t row = 0; row < rows; ++row) {
    float* x = states + row * width;
    float* y = normed + row * width;
    if (update != nullptr) {
      const float* added = update + row * width;
      for (int64_t i = 0; i < width; ++i) x[i] += added[i];
    }
    const float scale = 1 / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
    for (int64_t i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
  }
}

TOKAMAKE_CLONES
void attend(const float* projected, const float* cosines, const float* sines,
            const CacheView& cache, const int64_t* lengths, const AttentionShape& shape,
            float* mixed) {
  const int64_t width = shape.width, shared = shape.heads / shape.groups;
  const float scale = 1 / std::sqrt(static_cast<float>(width));
  std::vector<float> query(static_cast<size_t>(width)), weights;
  for (int64_t row = 0; row < shape.rows; ++row) {
    const float* queries = projected + row * (shape.heads + 2 * shape.groups) * width;
    const float* new_keys = queries + shape.heads * width;
    const float* new_values = new_keys + shape.groups * width;
    const float* cosine = cosines + row * width;
    const float* sine = sines + row * width;
    const int64_t before = lengths[row], size = before + 1;
    weights.resize(static_cast<size_t>(size));
    for (int64_t group = 0; group < shape.groups; ++group) {
      const int64_t offset = row * cache.row_stride + group * cache.group_stride;
      float* keys = cache.keys + offset;
      float* values = cache.values + offset;
      rotate(new_keys + group * width, cosine, sine, width, keys + before * width);
      std::copy_n(new_values + group * width, width, values + before * width);
      for (int64_t head = group * shared; head < (group + 1) * shared; ++head) {
        rotate(queries + head * width, cosine, sine, width, query.data());
        float largest = -std::numeric_limits<float>::infinity();
        for (int64_t place = 0; place < size; ++place) {
          const float score = scale * dot(query.data(), keys + place * width, width);
          weights[static_cast<size_t>(place)] = score;
          largest = std::max(largest, score);
        }
        float total = 0;
        for (float& weight : weights) total += weight = std::exp(weight - largest);
        float* out = mixed + (row * shape.heads + head) * width;
        std::fill_n(out, width, 0.0f);
        for (int64_t place = 0; place < size; ++place) {
          const float weight = weights[static_cast<size_t>(place)] / total;
          const float* value = values + place * width;
          for (int64_t i = 0; i < width; ++i) out[i] += weight * value[i];
        }
      }
    }
  }
}

TOKAMAKE_CLONES
void gate(const float* projected, int64_t rows, int64_t width, float* gated) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* gates = projected + row * 2 * width;
    const float* up = gates + width;
    float* out = gated + row * width;
    for (int64_t i = 0; i < width; ++i) out[i] = gates[i] / (1 + std::exp(-gates[i])) * up[i];
  }
}

}  // namespace tokamake
