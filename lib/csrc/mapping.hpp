// Samples of sentence data (BERT, T5, ICT), like Megatron's mappings.
#pragma once

#include <cstdint>
#include <vector>

#include "index.hpp"

namespace tokamake {

// Document d has sentences bounds[d] to bounds[d + 1]; `lengths` has the tokens of each sentence.
struct Sentences {
  const int64_t* bounds;
  int64_t num_documents;
  const Int32View& lengths;
};

struct SampleRule {
  int32_t num_epochs;
  uint64_t max_num_samples;  // no further epoch starts at this number
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

// Shuffled rows of T: first sentence, end of sentences, target tokens.
template <typename T>
std::vector<T> map_samples(const Sentences& sentences, const SampleRule& rule);

// Shuffled rows of T: first sentence, end of sentences, document, number of the block in its epoch.
// `title_lengths` has the tokens of the title of each document.
template <typename T>
std::vector<T> map_blocks(const Sentences& sentences, const Int32View& title_lengths,
                          const BlockRule& rule);

}  // namespace tokamake
