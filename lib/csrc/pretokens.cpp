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
}

PreTokenizer::PreTokenizer(Gpt2Words words) : gpt2_words_(std::move(words)) {}

PreTokenizer::PreTokenizer(std::vector<Splitter> splitters) : splitters_(std::move(splitters)) {}

}  // namespace tokamake
