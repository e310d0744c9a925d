#include "pretokens.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace tokamake {

namespace {

constexpr uint32_t kCodePoints = 0x110000;

uint8_t first_byte(uint32_t code_point) {
  if (code_point < 0x80) return static_cast<uint8_t>(code_point);
  if (code_point < 0x800) return static_cast<uint8_t>(0xC0 | code_point >> 6);
  if (code_point < 0x10000) return static_cast<uint8_t>(0xE0 | code_point >> 12);
  return static_cast<uint8_t>(0xF0 | code_point >> 18);
}

}  // namespace

Splitter::Splitter(std::vector<uint8_t> classes, std::vector<uint16_t> transitions,
                   size_t num_classes, bool keeps_matches, bool keeps_gaps)
    : classes_(std::move(classes)),
      transitions_(std::move(transitions)),
      num_classes_(num_classes),
      of_bytes_(classes_.size() == 256),
      keeps_matches_(keeps_matches),
      keeps_gaps_(keeps_gaps) {
  const size_t width = num_classes_ + 1;
  if (!of_bytes_ && classes_.size() != kCodePoints)
    throw std::invalid_argument("there is a class for each of 0x110000 code points or 256 bytes");
  if (*std::max_element(classes_.begin(), classes_.end()) >= num_classes_)
    throw std::invalid_argument("a class is too large");
  if (transitions_.size() < 2 * width || transitions_.size() % width != 0)
    throw std::invalid_argument("each state has an entry for each class and the end");
  for (const uint16_t entry : transitions_)
    if (entry >> 1 >= transitions_.size() || (entry >> 1) % width != 0)
      throw std::invalid_argument("an entry names no state");
  if (std::any_of(transitions_.begin() + static_cast<std::ptrdiff_t>(width),
                  transitions_.begin() + static_cast<std::ptrdiff_t>(2 * width),
                  [](uint16_t entry) { return entry & 1; }))
    throw std::invalid_argument("the expression matches an empty text");
  std::copy_n(classes_.begin(), bytes_.size(), bytes_.begin());
  for (uint32_t i = 0; i < classes_.size(); ++i)
    if (transitions_[width + classes_[i]] >> 1 != 0)
      can_begin_[of_bytes_ ? i : first_byte(i)] = true;
  for (size_t i = 0; i < transitions_.size(); ++i) {
    const uint32_t entry = transitions_[i];
    const uint32_t from_start = transitions_[width + i % width] >> 1;
    if (entry & 1 && entry >> 1 == 0 && from_start != 0)
      steps_.push_back(from_start << 2 | 1);
    else
      steps_.push_back((entry >> 1) << 2 | (entry & 1) << 1);
  }
}

const char* Splitter::split_run(const char* at, const char* end, WordBatch& batch) const {
  const uint32_t* const steps = steps_.data();
  const char* ends_at = at;  // of a match of the current word; its begin if there is none yet
  WordBatch::Word* word = batch.words.data() + batch.size;
  WordBatch::Word* const half = batch.words.data() + WordBatch::kCapacity / 2;
  word->begin = at;
  size_t state = num_classes_ + 1;
  while (at < end) {
    // Each character ends at most one word.
    const char* const stop = at + std::min<ptrdiff_t>(end - at, WordBatch::kCapacity / 2);
    while (at < stop) {
      const char* const here = at;
      const size_t kind = class_at(at);
      const uint32_t step = steps[state + kind];
      if (step < 4) {
        if (step != 0) ends_at = here;
        // No longer match: the next word begins where the last match ended, if there was one.
        if (ends_at == word->begin) goto done;
        word->end = ends_at;
        (++word)->begin = at = ends_at;
        state = num_classes_ + 1;
        break;
      }
      word->end = here;  // without branches, which could not be predicted
      word[1].begin = here;
      word += step & 1;
      ends_at = step & 3 ? here : ends_at;
      state = step >> 2;
    }
    if (word > half) break;
  }
  if (at >= end && word->begin < end) {
    if (transitions_[state + num_classes_] & 1) ends_at = end;
    if (ends_at > word->begin) {
      word->end = ends_at;
      (++word)->begin = ends_at;
    }
  }
done:
  batch.size = static_cast<size_t>(word - batch.words.data());
  return word->begin;
}

const char* Splitter::split_slowly(const char* begin, const char* end, WordBatch& batch) const {
  for (const char* at = begin; at < end; ++at) {  // bytes inside a character begin no match
    if (!can_begin_[static_cast<uint8_t>(*at)]) continue;
    const char* const after = match(at, end);
    if (after == nullptr) continue;
    if (begin < at && keeps_gaps_) batch.add(begin, at);
    if (keeps_matches_) batch.add(at, after);
    return after;
  }
  if (keeps_gaps_) batch.add(begin, end);
  return end;
}

const char* Splitter::match(const char* at, const char* end) const {
  const char* after = nullptr;
  size_t state = num_classes_ + 1;
  while (at < end) {
    const char* const here = at;
    const uint16_t entry = transitions_[state + class_at(at)];
    after = entry & 1 ? here : after;
    state = entry >> 1;
    if (state == 0) return after;
  }
  return transitions_[state + num_classes_] & 1 ? end : after;
}

PreTokenizer::PreTokenizer(std::vector<Splitter> splitters, std::vector<uint8_t> joints)
    : splitters_(std::move(splitters)), joints_(std::move(joints)) {
  if (!joints_.empty() && joints_.size() != size_t{1} << 16)
    throw std::invalid_argument("there is a joint for each of 256 * 256 pairs of bytes");
}

}  // namespace tokamake
