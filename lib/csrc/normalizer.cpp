#include "normalizer.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "text.hpp"

namespace tokamake {

namespace {

constexpr size_t kCodePoints = 0x110000;
constexpr size_t kGrowth = 12;            // of UTF-8: NFKC has at most 11 (Unicode, UAX 15)
constexpr size_t kLongest = 1024;         // bytes of a cluster that is kept
constexpr size_t kMaxBytes = 32'000'000;  // of all clusters that are kept
constexpr size_t kEntry = 128;            // bytes of memory of a cluster, besides its texts

size_t size_in_utf8(size_t code_point) {
  return 1 + (code_point >= 0x80) + (code_point >= 0x800) + (code_point >= 0x10000);
}

}  // namespace

CharacterMap::CharacterMap(std::vector<uint32_t> numbers, std::vector<std::string> texts,
                           std::vector<uint8_t> ranks)
    : numbers_(std::move(numbers)), texts_(std::move(texts)), ranks_(std::move(ranks)) {
  if (numbers_.size() != kCodePoints || (!ranks_.empty() && ranks_.size() != kCodePoints))
    throw std::invalid_argument("a map has an entry for each of 0x110000 code points");
  for (size_t point = 0; point < kCodePoints; ++point) {
    if (numbers_[point] == 0) continue;
    if (numbers_[point] >= texts_.size())
      throw std::invalid_argument("a map names a text that it lacks");
    const size_t size = size_in_utf8(point);
    growth_ = std::max(growth_, (texts_[numbers_[point]].size() + size - 1) / size);
  }
}

std::string_view CharacterMap::apply(std::string_view text, std::string& buffer) const {
  if (empty()) return text;
  const char* const end = text.data() + text.size();
  const char* copied = text.data();
  size_t marks = 0;  // begin of the marks at the end of the buffer
  for (const char* at = copied; at < end;) {
    const char* const begin = at;
    const uint32_t point = next_code_point(at);
    const uint32_t number = numbers_[point];
    const uint8_t rank = ranks_.empty() ? 0 : ranks_[point];
    if (number == 0 && rank == 0) continue;
    if (copied == text.data()) buffer.clear();
    if (copied < begin || rank == kSeparates) {
      sort_marks(buffer, marks);
      buffer.append(copied, begin);
      marks = buffer.size();
    }
    const std::string_view same(begin, static_cast<size_t>(at - begin));
    append(number == 0 ? same : std::string_view(texts_[number]), buffer, marks);
    copied = at;
  }
  if (copied == text.data()) return text;
  sort_marks(buffer, marks);
  return buffer.append(copied, end);
}

void CharacterMap::append(std::string_view piece, std::string& text, size_t& marks) const {
  if (ranks_.empty()) {
    text.append(piece);
    return;
  }
  const char* const end = piece.data() + piece.size();
  for (const char* at = piece.data(); at < end;) {
    const char* const begin = at;
    const uint8_t rank = ranks_[next_code_point(at)];
    if (rank == 0) sort_marks(text, marks);
    text.append(begin, at);
    if (rank == 0) marks = text.size();
  }
}

void CharacterMap::sort_marks(std::string& text, size_t begin) const {
  if (ranks_.empty() || text.size() - begin < 4) return;  // a mark has at least 2 bytes
  const std::string run = text.substr(begin);
  std::vector<std::pair<uint8_t, std::string_view>> marks;
  for (const char *at = run.data(), *const end = at + run.size(); at < end;) {
    const char* const mark = at;
    const uint8_t rank = ranks_[next_code_point(at)];
    marks.emplace_back(rank, std::string_view(mark, static_cast<size_t>(at - mark)));
  }
  std::stable_sort(marks.begin(), marks.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  text.resize(begin);
  for (const auto& mark : marks) text.append(mark.second);
}

Normalizer::Normalizer(CharacterMap before, std::vector<uint8_t> marks, CharacterMap after)
    : before_(std::move(before)), after_(std::move(after)), marks_(std::move(marks)) {
  if (!marks_.empty() && marks_.size() != kCodePoints)
    throw std::invalid_argument("there is a mark for each of 0x110000 code points");
}

std::string_view Normalizer::normalize(std::string_view text) {
  text = before_.apply(text, first_);
  text = replace_clusters(text, second_);
  return after_.apply(text, text.data() == first_.data() ? second_ : first_);
}

template <typename Visit>
void Normalizer::clusters(std::string_view text, const Visit& visit) const {
  if (marks_.empty()) return;
  const char* const end = text.data() + text.size();
  const char* before = text.data();
  for (const char* at = before; at < end;) {
    const char* const begin = at;
    uint8_t mark = marks_[next_code_point(at)];
    if (mark == 0) {
      before = begin;
      continue;
    }
    for (const char* next = at; at < end;) {
      const uint8_t other = marks_[next_code_point(next)];
      if (other == 0 && mark != kJoins) break;
      at = next;
      mark = other;
    }
    visit(std::string_view(before, static_cast<size_t>(at - before)));
    before = at;  // if the text ends here, or before a character without marks
  }
}

const std::string* Normalizer::find(std::string_view cluster) {
  const auto& all = cluster.size() > kLongest ? known_once_ : known_;
  const auto known = all.find(key_.assign(cluster));
  if (known != all.end()) return &known->second;
  unknown_.insert(key_);
  return nullptr;
}

std::string_view Normalizer::normalize_word(std::string_view word, bool& is_known) {
  is_known = true;
  if (marks_.empty()) return normalize(word);
  const char* const end = word.data() + word.size();
  uint8_t marks = 0;
  for (const char* at = word.data(); at < end;) marks |= marks_[next_code_point(at)];
  if (marks == 0) return word;
  if (marks & kJoins) {
    const auto* const known = find(word);
    is_known = known != nullptr;
    return is_known ? std::string_view(*known) : word;
  }
  const std::string_view normalized = replace_clusters(word, second_);
  is_known = unknown_.empty();
  return normalized;
}

std::string_view Normalizer::replace_clusters(std::string_view text, std::string& buffer) {
  const char* copied = text.data();
  clusters(text, [&](std::string_view cluster) {
    if (copied == text.data()) buffer.clear();
    buffer.append(copied, cluster.data());
    copied = cluster.data() + cluster.size();
    if (const auto* const known = find(cluster)) buffer.append(*known);
  });
  if (copied == text.data()) return text;
  return buffer.append(copied, text.data() + text.size());
}

void Normalizer::learn(const std::string& cluster, std::string normalized) {
  if (normalized.size() > room_for_clusters(cluster))
    throw std::length_error("normalized text is too long");
  if (cluster.size() > kLongest) {
    known_once_.insert_or_assign(cluster, std::move(normalized));
    return;
  }
  known_bytes_ += cluster.size() + normalized.size() + kEntry;
  known_.insert_or_assign(cluster, std::move(normalized));
}

size_t Normalizer::room_for_clusters(std::string_view text) const {
  size_t bytes = text.size();
  clusters(text, [&](std::string_view cluster) {
    bytes = sum_of(bytes, product_of(kGrowth - 1, cluster.size()));
  });
  return bytes;
}

size_t Normalizer::room_for(std::string_view text) const {
  if (before_.empty()) return product_of(room_for_clusters(text), after_.growth());
  const size_t bytes = product_of(product_of(text.size(), before_.growth()), after_.growth());
  return marks_.empty() ? bytes : product_of(bytes, kGrowth);
}

void Normalizer::trim() {
  unknown_.clear();
  known_once_.clear();
  if (known_bytes_ <= kMaxBytes) return;
  known_.clear();
  known_bytes_ = 0;
}

}  // namespace tokamake
