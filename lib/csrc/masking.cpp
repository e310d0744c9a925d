// Draws have the order of megatron-core's BERTMaskedWordPieceDataset and T5MaskedWordPieceDataset.
#include "masking.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

namespace tokamake {

void Masker::find_words(const int32_t* tokens, int64_t count) {
  positions_.clear();
  starts_.clear();
  for (int64_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocabulary()) {
      throw std::out_of_range("a token is not in the vocabulary");
    }
    const Piece piece = rule_.pieces[static_cast<size_t>(tokens[i])];
    if (piece == Piece::kBoundary) continue;
    // A continuation belongs to the word before, even if a separator is between them.
    if (piece == Piece::kWord || starts_.empty()) {
      starts_.push_back(static_cast<int32_t>(positions_.size()));
    }
    positions_.push_back(static_cast<int32_t>(i));
  }
  starts_.push_back(static_cast<int32_t>(positions_.size()));
}

double Masker::budget(int64_t count, int32_t target) const {
  // The default rounding mode is Python's: a half becomes even.
  const double share = std::nearbyint(static_cast<double>(count) * rule_.probability);
  return std::min(rule_.probability * target, std::max(1.0, share));
}

int32_t Masker::draw_words(RandomState& random) const {
  if (!rule_.cumulative.empty()) return static_cast<int32_t>(random.choice(rule_.cumulative)) + 1;
  const int64_t drawn = random.geometric(rule_.stop_probability);
  // The least number is 0, with probability 2**-53.
  return static_cast<int32_t>(std::clamp<int64_t>(drawn, 1, rule_.max_ngram));
}

Span Masker::longest_fitting(int32_t word, int32_t num_words, double budget, int64_t masked) const {
  const auto last = static_cast<int32_t>(starts_.size()) - 1;
  const int32_t first = starts_[static_cast<size_t>(word)];
  for (; num_words > 0; --num_words) {
    const int32_t end = starts_[static_cast<size_t>(std::min(word + num_words, last))];
    if (budget >= static_cast<double>(masked + end - first)) return {first, end};
  }
  return {first, first};
}

bool Masker::overlaps(const Span& span) const {
  return std::any_of(positions_.begin() + span.first, positions_.begin() + span.end,
                     [&](int32_t position) { return taken_[static_cast<size_t>(position)] != 0; });
}

namespace {

// A range of tokens that is shortened at both ends.
struct Segment {
  const int32_t* begin;
  const int32_t* end;

  int64_t size() const { return end - begin; }
};

void require(bool fits, const char* what) {
  if (!fits) throw std::length_error(what);
}

}  // namespace

MaskedFacts mask_sample(const int32_t* tokens, const std::vector<int32_t>& lengths, int32_t target,
                        bool in_two, const MaskedTokens& special, uint32_t seed, Masker& masker,
                        const MaskedRow& row) {
  RandomState random(seed);
  const auto num_sentences = static_cast<uint32_t>(lengths.size());
  int64_t pivot = num_sentences;
  MaskedFacts facts{0, false, false};
  if (in_two) {
    require(num_sentences > 1, "a sample in two parts needs two sentences");
    pivot = num_sentences > 2 ? random.integer(1, num_sentences - 1) : 1;
    facts.swapped = random.uniform() < 0.5;
  }
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const int64_t cut = std::accumulate(lengths.begin(), lengths.begin() + pivot, int64_t{0});
  Segment first{tokens, tokens + cut};
  Segment second{tokens + cut, tokens + total};
  if (facts.swapped) std::swap(first, second);
  facts.truncated = total > target;
  while (first.size() + second.size() > target) {
    Segment& longer = first.size() > second.size() ? first : second;
    if (random.uniform() < 0.5) {
      ++longer.begin;
    } else {
      --longer.end;
    }
  }

  thread_local std::vector<int32_t> sequence;
  sequence.assign(1, special.cls);
  sequence.insert(sequence.end(), first.begin, first.end);
  sequence.push_back(special.sep);
  const size_t end_of_first = sequence.size();
  if (second.size() > 0) {
    sequence.insert(sequence.end(), second.begin, second.end);
    sequence.push_back(special.sep);
  }
  facts.length = static_cast<int64_t>(sequence.size());
  require(facts.length <= row.length, "the sample is longer than its row");
  std::copy(sequence.begin(), sequence.end(), row.tokens);
  std::fill(row.tokens + facts.length, row.tokens + row.length, special.pad);
  std::fill(row.types, row.types + row.length, 0);
  std::fill(row.types + end_of_first, row.types + facts.length, 1);
  std::fill(row.labels, row.labels + row.length, kNoLabel);
  masker.draw(sequence.data(), facts.length, target, random, [&](int32_t position) {
    row.labels[position] = sequence[static_cast<size_t>(position)];
    if (random.uniform() < 0.8) {
      row.tokens[position] = special.mask;
    } else if (random.uniform() >= 0.5) {
      const auto drawn = random.integer(0, static_cast<uint32_t>(special.random.size()));
      row.tokens[position] = special.random[static_cast<size_t>(drawn)];
    }
  });
  return facts;
}

namespace {

// Spans of a sample in the order of their positions.
std::vector<Span> ordered_spans(const int32_t* tokens, int64_t count, int32_t target, uint32_t seed,
                                Masker& masker) {
  RandomState random(seed);
  std::vector<Span> spans = masker.draw(tokens, count, target, random, [](int32_t) {});
  std::sort(spans.begin(), spans.end(),
            [](const Span& one, const Span& other) { return one.first < other.first; });
  return spans;
}

}  // namespace

SpanFacts corrupt_spans(const int32_t* tokens, int64_t count, int32_t target,
                        const SpanTokens& special, uint32_t seed, Masker& masker,
                        const SpanRow& row) {
  const std::vector<Span> spans = ordered_spans(tokens, count, target, seed, masker);
  require(spans.size() <= special.sentinels.size(), "the sample has more spans than sentinels");
  SpanFacts facts{0, 1};
  const auto encode = [&](int64_t token) {
    require(facts.length < row.length, "the sample is longer than its row");
    row.encoder[facts.length++] = token;
  };
  const auto decode = [&](int64_t token) {
    require(facts.decoder_length < row.decoder_length, "the decoder's row is too short");
    row.labels[facts.decoder_length - 1] = token;
    row.decoder[facts.decoder_length++] = token;
  };
  require(row.decoder_length > 0, "the decoder's row is too short");
  row.decoder[0] = special.bos;
  int64_t next = 0;
  for (size_t number = 0; number < spans.size(); ++number) {
    const auto position = [&](int32_t i) { return masker.positions()[static_cast<size_t>(i)]; };
    const Span& span = spans[number];
    for (; next < position(span.first); ++next) encode(tokens[next]);
    encode(special.sentinels[number]);
    decode(special.sentinels[number]);
    for (int32_t i = span.first; i < span.end; ++i) decode(tokens[position(i)]);
    next = position(span.end - 1) + 1;
  }
  for (; next < count; ++next) encode(tokens[next]);
  row.labels[facts.decoder_length - 1] = special.eos;
  std::fill(row.encoder + facts.length, row.encoder + row.length, special.pad);
  std::fill(row.decoder + facts.decoder_length, row.decoder + row.decoder_length, special.pad);
  std::fill(row.labels + facts.decoder_length, row.labels + row.decoder_length, kNoLabel);
  return facts;
}

SpanSize measure_spans(const int32_t* tokens, int64_t count, int32_t target, uint32_t seed,
                       Masker& masker) {
  RandomState random(seed);
  const auto& spans = masker.draw(tokens, count, target, random, [](int32_t) {});
  SpanSize size{1, static_cast<int64_t>(spans.size())};
  for (const Span& span : spans) size.decoder_length += 1 + span.end - span.first;
  return size;
}

}  // namespace tokamake
