// Cuts documents into groups of whole sentences and shuffles them with Megatron's random
// generators.
#include "mapping.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>

namespace tokamake {
namespace {

constexpr int32_t kLongSentence = 512;  // documents with a longer one are left out

template <typename Rule>
void check(const Sentences& sentences, const Rule& rule) {
  if (rule.num_epochs < 1 || rule.seed < 1 || rule.min_num_sent < 1 || rule.max_seq_length < 2) {
    throw std::invalid_argument(
        "num_epochs, seed and min_num_sent start at 1, max_seq_length at 2");
  }
  const int64_t* bounds = sentences.bounds;
  if (bounds[0] < 0 || bounds[sentences.num_documents] > sentences.lengths.size()) {
    throw std::out_of_range("a document's sentences are outside the lengths");
  }
  if (!std::is_sorted(bounds, bounds + sentences.num_documents + 1)) {
    throw std::invalid_argument("documents' bounds decrease");
  }
}

bool has_long_sentence(const Int32View& lengths, int64_t first, int64_t last) {
  for (; first < last; ++first) {
    if (lengths[first] > kLongSentence) return true;
  }
  return false;
}

// Target lengths of samples; one in `ratio` is shorter than the maximum.
class TargetLengths {
 public:
  explicit TargetLengths(const SampleRule& rule)
      : generator_(static_cast<uint32_t>(rule.seed)),
        ratio_(rule.short_seq_prob > 0
                   ? static_cast<uint32_t>(std::round(1.0 / rule.short_seq_prob))
                   : 0),
        longest_(static_cast<uint32_t>(rule.max_seq_length)) {}

  int32_t next() {
    if (ratio_ == 0) return static_cast<int32_t>(longest_);
    // The C++ standard specifies mt19937 exactly, but not its distributions: use raw numbers.
    const auto drawn = static_cast<uint32_t>(generator_());
    return static_cast<int32_t>(drawn % ratio_ == 0 ? 2 + drawn % (longest_ - 1) : longest_);
  }

 private:
  std::mt19937 generator_;
  uint32_t ratio_;
  uint32_t longest_;
};

// Calls emit(first, end, target) for each group of sentences of a document. A group ends when it
// has the target length and `min_num_sent` sentences and leaves at least `min_remaining` sentences,
// or when the document ends. `next_target` returns the target length of the next group.
template <typename NextTarget, typename Emit>
void cut(const Int32View& lengths, int64_t first, int64_t last, int32_t min_num_sent,
         int64_t min_remaining, const NextTarget& next_target, const Emit& emit) {
  int64_t tokens = 0;
  int64_t start = first;
  int32_t target = next_target();
  for (int64_t sentence = first; sentence < last; ++sentence) {
    tokens += lengths[sentence];
    const int64_t left = last - sentence - 1;
    const bool full =
        tokens >= target && left >= min_remaining && sentence + 1 - start >= min_num_sent;
    if (!full && left > 0) continue;
    emit(start, sentence + 1, target);
    start = sentence + 1;
    tokens = 0;
    target = next_target();
  }
}

template <size_t kColumns, typename T>
void shuffle(std::vector<T>& rows, int32_t seed) {
  std::mt19937_64 generator(static_cast<uint64_t>(static_cast<int64_t>(seed) + 1));
  for (size_t row = rows.size() / kColumns; row-- > 1;) {
    const auto partner = static_cast<size_t>(generator() % (row + 1));
    std::swap_ranges(rows.begin() + static_cast<int64_t>(row * kColumns),
                     rows.begin() + static_cast<int64_t>((row + 1) * kColumns),
                     rows.begin() + static_cast<int64_t>(partner * kColumns));
  }
}

}  // namespace

template <typename T>
std::vector<T> map_samples(const Sentences& sentences, const SampleRule& rule) {
  check(sentences, rule);
  if (!(rule.short_seq_prob >= 0 && rule.short_seq_prob <= 1)) {
    throw std::invalid_argument("short_seq_prob is 0 to 1");
  }
  if (rule.short_seq_prob > 0 && 1.0 / rule.short_seq_prob >= std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("short_seq_prob is too small; use 0 for never");
  }
  const Int32View& lengths = sentences.lengths;
  std::vector<T> rows;
  TargetLengths target_lengths(rule);
  for (int32_t epoch = 0; epoch < rule.num_epochs; ++epoch) {
    if (rows.size() / 3 >= rule.max_num_samples) break;
    const size_t size_before = rows.size();
    for (int64_t document = 0; document < sentences.num_documents; ++document) {
      const int64_t first = sentences.bounds[document];
      const int64_t last = sentences.bounds[document + 1];
      if (last - first < rule.min_num_sent) continue;
      if (last - first > 1 && has_long_sentence(lengths, first, last)) continue;
      cut(
          lengths, first, last, rule.min_num_sent, 2, [&] { return target_lengths.next(); },
          [&](int64_t start, int64_t end, int32_t target) {
            rows.insert(rows.end(),
                        {static_cast<T>(start), static_cast<T>(end), static_cast<T>(target)});
          });
    }
    if (rows.size() == size_before) break;  // no document gives a sample, however many epochs
  }
  shuffle<3>(rows, rule.seed);
  return rows;
}

template <typename T>
std::vector<T> map_blocks(const Sentences& sentences, const Int32View& title_lengths,
                          const BlockRule& rule) {
  check(sentences, rule);
  if (title_lengths.size() != sentences.num_documents) {
    throw std::invalid_argument("each document has one title length");
  }
  const Int32View& lengths = sentences.lengths;
  std::vector<T> rows;
  for (int32_t epoch = 0; epoch < rule.num_epochs; ++epoch) {
    if (rows.size() / 4 >= rule.max_num_samples) break;
    const size_t size_before = rows.size();
    T block = 0;
    for (int64_t document = 0; document < sentences.num_documents; ++document) {
      const int64_t first = sentences.bounds[document];
      const int64_t last = sentences.bounds[document + 1];
      if (last - first < rule.min_num_sent || has_long_sentence(lengths, first, last)) continue;
      const int32_t target = rule.max_seq_length - title_lengths[document];
      cut(
          lengths, first, last, rule.min_num_sent, rule.min_num_sent, [&] { return target; },
          [&](int64_t start, int64_t end, int32_t) {
            rows.insert(rows.end(), {static_cast<T>(start), static_cast<T>(end),
                                     static_cast<T>(document), block++});
          });
    }
    if (rows.size() == size_before) break;
  }
  shuffle<4>(rows, rule.seed);
  return rows;
}

template std::vector<uint32_t> map_samples(const Sentences&, const SampleRule&);
template std::vector<uint64_t> map_samples(const Sentences&, const SampleRule&);
template std::vector<uint32_t> map_blocks(const Sentences&, const Int32View&, const BlockRule&);
template std::vector<uint64_t> map_blocks(const Sentences&, const Int32View&, const BlockRule&);

}  // namespace tokamake
