// Samples of documents that are stored sentence by sentence (BERT, T5, ICT), as Megatron maps them.
#pragma once

#include <cstdint>
#include <vector>

#include "index.hpp"

namespace tokamake {

// Sentences of document d are bounds[d] to bounds[d + 1]; lengths are their tokens.
struct Sentences {
  const int64_t* bounds;
  int64_t num_documents;
  const Int32View& lengths;
};

struct SampleRule {
  int32_t num_epochs;
  uint64_t max_num_samples;  // no epoch starts when there are so many
  int32_t max_seq_length;
  double short_seq_prob;
  int32_t seed;
  int32_t min_num_sent;
};

struct BlockRule {
  int32_t num_epochs;
  uint64_t max_num_samples;
  int32_t max_seq_length;
  int32_t seed;
  int32_t min_num_sent;
};

// Rows of T, shuffled: first sentence, end of sentences, tokens aimed at.
// Both throw std::invalid_argument if a number is out of range or the bounds fall,
// std::out_of_range if a bound lies beyond the lengths.
template <typename T>
std::vector<T> map_samples(const Sentences& sentences, const SampleRule& rule);

// Rows of T, shuffled: first sentence, end of sentences, document, number of the block in its
// epoch. `title_lengths` has an entry for each document.
template <typename T>
std::vector<T> map_blocks(const Sentences& sentences, const Int32View& title_lengths,
                          const BlockRule& rule);

}  // namespace tokamake
