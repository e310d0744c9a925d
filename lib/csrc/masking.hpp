// Samples of BERT (masked tokens) and T5 (spans), like megatron-core's datasets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "random_state.hpp"

namespace tokamake {

enum class Piece : uint8_t { kWord = 0, kContinuation = 1, kBoundary = 2 };

struct MaskingRule {
  std::vector<Piece> pieces;       // of each token of the vocabulary
  double probability;              // share of the tokens to mask
  int32_t max_ngram;               // longest run of words that is masked at once
  std::vector<double> cumulative;  // of the number of words, from 1 on; empty: geometric
  double stop_probability;         // of the geometric distribution
};

// Positions of the tokens of a sample that are masked together.
struct Span {
  int32_t first;  // in Masker::positions()
  int32_t end;
};

// Draws whole words to mask. Its buffers are reused: one Masker for each thread.
class Masker {
 public:
  explicit Masker(MaskingRule rule) : rule_(std::move(rule)) {}

  int64_t vocabulary() const { return static_cast<int64_t>(rule_.pieces.size()); }
  // Positions of tokens that belong to words, word by word.
  const std::vector<int32_t>& positions() const { return positions_; }

  // Chooses spans of at most min(probability * target, max(1, round(probability * count))) tokens
  // and calls on_mask(position) for each of them, in the order of the draws. Returns the spans in
  // that order.
  template <typename OnMask>
  const std::vector<Span>& draw(const int32_t* tokens, int64_t count, int32_t target,
                                RandomState& random, const OnMask& on_mask) {
    find_words(tokens, count);
    const auto num_words = static_cast<int32_t>(starts_.size()) - 1;
    const double budget = this->budget(count, target);
    order_.resize(static_cast<std::size_t>(num_words));
    for (int32_t word = 0; word < num_words; ++word) order_[static_cast<std::size_t>(word)] = word;
    random.shuffle(order_);
    taken_.assign(static_cast<std::size_t>(count), 0);
    spans_.clear();
    int64_t masked = 0;
    for (const int32_t word : order_) {
      if (static_cast<double>(masked) >= budget) break;
      const Span span = longest_fitting(word, draw_words(random), budget, masked);
      if (span.first == span.end || overlaps(span)) continue;
      for (int32_t i = span.first; i < span.end; ++i) {
        const int32_t position = positions_[static_cast<std::size_t>(i)];
        taken_[static_cast<std::size_t>(position)] = 1;
        on_mask(position);
      }
      masked += span.end - span.first;
      spans_.push_back(span);
    }
    return spans_;
  }

 private:
  void find_words(const int32_t* tokens, int64_t count);
  double budget(int64_t count, int32_t target) const;
  int32_t draw_words(RandomState& random) const;
  Span longest_fitting(int32_t word, int32_t num_words, double budget, int64_t masked) const;
  bool overlaps(const Span& span) const;

  MaskingRule rule_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> starts_;  // of each word in positions_, then their number
  std::vector<int32_t> order_;
  std::vector<uint8_t> taken_;
  std::vector<Span> spans_;
};

// A BERT sample to write: arrays of `length` numbers.
struct MaskedRow {
  int64_t length;
  int64_t* tokens;
  int64_t* types;   // 0 up to the first separator, then 1; 0 for padding
  int64_t* labels;  // original tokens, kNoLabel where nothing is masked
};

struct MaskedFacts {
  int64_t length;  // tokens that are not padding
  bool swapped;    // whether the second part of the text comes first
  bool truncated;  // whether tokens were dropped
};

struct MaskedTokens {
  int64_t pad;
  int32_t cls;
  int32_t sep;
  int64_t mask;
  std::vector<int32_t> random;  // tokens that may replace a masked token
};

constexpr int64_t kNoLabel = -100;

// `lengths` has the tokens of each of the sentences, which follow each other in `tokens`. With
// `in_two`, the sample is divided between two sentences.
MaskedFacts mask_sample(const int32_t* tokens, const std::vector<int32_t>& lengths, int32_t target,
                        bool in_two, const MaskedTokens& special, uint32_t seed, Masker& masker,
                        const MaskedRow& row);

// A T5 sample to write.
struct SpanRow {
  int64_t length;
  int64_t* encoder;
  int64_t decoder_length;
  int64_t* decoder;
  int64_t* labels;
};

struct SpanTokens {
  int64_t pad;
  int64_t bos;
  int64_t eos;
  std::vector<int64_t> sentinels;
};

struct SpanFacts {
  int64_t length;          // tokens of the encoder that are not padding
  int64_t decoder_length;  // tokens of the decoder
};

// Lengths of a sample without its tokens: `spans` is one span for each sentinel.
struct SpanSize {
  int64_t decoder_length;
  int64_t spans;
};

// Both functions take the tokens of a sample, at most `target`. The first throws
// std::length_error if the row or the sentinels are too few.
SpanFacts corrupt_spans(const int32_t* tokens, int64_t count, int32_t target,
                        const SpanTokens& special, uint32_t seed, Masker& masker,
                        const SpanRow& row);
SpanSize measure_spans(const int32_t* tokens, int64_t count, int32_t target, uint32_t seed,
                       Masker& masker);

}  // namespace tokamake
