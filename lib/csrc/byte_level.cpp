#include "byte_level.hpp"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include "text.hpp"

namespace tokamake {

namespace {

constexpr size_t kHugePage = size_t{1} << 21;
constexpr int kLineBits = 17;
constexpr size_t kLines = size_t{1} << kLineBits;  // 8 MiB for short words
constexpr size_t kSlots = size_t{1} << 16;         // 1 MiB for longer words,
constexpr size_t kTextBytes = size_t{1} << 21;     // their text,
constexpr size_t kIds = size_t{1} << 20;           // and tokens
constexpr size_t kMaxClusters = 100'000;           // whose normalized text is known
constexpr size_t kGrowth = 11;     // of UTF-8 that is normalized by NFKC (Unicode, UAX 15)
constexpr size_t kLongest = 1024;  // bytes; longer words are rare and not cached

// Key of a word of 1 to 15 bytes. Bytes after the word may be read, up to `end`.
inline WordCache::Key key_of(std::string_view word, const char* end) {
  const size_t size = word.size();
  const char* from = word.data();
  std::array<char, 16> copy{};
  if (end - from < 16) {
    std::memcpy(copy.data(), from, size);
    from = copy.data();
  }
  const uint64_t mark = uint64_t{size} << 56;
  if (size <= 8) return {load_bytes(from) & ~uint64_t{0} >> (64 - 8 * size), mark};
  return {load_bytes(from), (load_bytes(from + 8) & ~uint64_t{0} >> (128 - 8 * size)) | mark};
}

}  // namespace

WordCache::WordCache() : slots_(kSlots) {
  void* memory = std::aligned_alloc(kHugePage, kLines * sizeof(Line));
  if (memory == nullptr) throw std::bad_alloc();
#ifdef __linux__
  // With small pages most look-ups would also miss the TLB.
  madvise(memory, kLines * sizeof(Line), MADV_HUGEPAGE);
#endif
  lines_.reset(static_cast<Line*>(memory));
  std::uninitialized_fill_n(lines_.get(), kLines, Line{});
  texts_.assign(kTextBytes, '\0');  // allocate and touch all memory now
  ids_.assign(kIds, 0);
  texts_.clear();
  ids_.clear();
}

void WordCache::Free::operator()(Line* lines) const { std::free(lines); }

void WordCache::clear() {
  std::fill_n(lines_.get(), kLines, Line{});
  std::fill(slots_.begin(), slots_.end(), Long{});
  used_ = 0;
  texts_.clear();
  ids_.clear();
}

WordCache::Line& WordCache::line_of(Key key) {
  uint64_t hash = (key.first ^ (key.rest * kHashFactor)) * kHashFactor;
  hash ^= hash >> 32;
  return lines_[hash * kHashFactor >> (64 - kLineBits)];
}

uint32_t* WordCache::write(uint32_t id, uint32_t count, uint32_t* out) const {
  return std::copy_n(ids_.data() + id, count, out);
}

uint32_t* WordCache::write(Key key, Line& line, uint32_t* out) const {
  const auto same = [&](const Key& other) {
    return ((other.first ^ key.first) | (other.rest ^ key.rest)) == 0;
  };
  if (!same(line.latest.key)) {
    if (!same(line.earlier.key)) return nullptr;
    std::swap(line.latest, line.earlier);
  }
  const Short& word = line.latest;
  if (word.count > kFew) return write(word.ids[0], word.count, out);
  std::memcpy(out, word.ids, sizeof word.ids);  // a copy of fixed size is faster
  return out + word.count;
}

void WordCache::add(Key key, Line& line, const std::vector<uint32_t>& ids) {
  if (ids_.size() + ids.size() > kIds) clear();
  Short word;
  word.key = key;
  word.count = static_cast<uint32_t>(ids.size());
  if (ids.size() <= kFew) {
    std::copy(ids.begin(), ids.end(), word.ids);
  } else {
    word.ids[0] = static_cast<uint32_t>(ids_.size());
    ids_.insert(ids_.end(), ids.begin(), ids.end());
  }
  line.earlier = line.latest;
  line.latest = word;
}

uint32_t* WordCache::write(std::string_view word, uint32_t* out) const {
  const uint32_t hash = hash_of(word);
  for (size_t at = hash & (kSlots - 1); slots_[at].size != 0; at = (at + 1) & (kSlots - 1)) {
    const Long& known = slots_[at];
    if (known.hash == hash && word == std::string_view(texts_.data() + known.text, known.size))
      return write(known.id, known.count, out);
  }
  return nullptr;
}

void WordCache::add(std::string_view word, const std::vector<uint32_t>& ids) {
  if (word.size() > kLongest) return;
  if (2 * used_ >= kSlots || texts_.size() + word.size() > kTextBytes ||
      ids_.size() + ids.size() > kIds)
    clear();
  const uint32_t hash = hash_of(word);
  size_t at = hash & (kSlots - 1);
  while (slots_[at].size != 0) at = (at + 1) & (kSlots - 1);
  slots_[at] = {hash, static_cast<uint32_t>(texts_.size()), static_cast<uint32_t>(word.size()),
                static_cast<uint32_t>(ids_.size()), static_cast<uint32_t>(ids.size())};
  ++used_;
  texts_.append(word);
  ids_.insert(ids_.end(), ids.begin(), ids.end());
}

Normalizer::Normalizer(std::vector<uint8_t> marks) : marks_(std::move(marks)) {
  if (marks_.empty()) return;
  if (marks_.size() != 0x110000)
    throw std::invalid_argument("there is a mark for each of 0x110000 code points");
  if (std::any_of(marks_.begin(), marks_.begin() + 0x80, [](uint8_t mark) { return mark; }))
    throw std::invalid_argument("ASCII is normalized");
}

template <typename Visit>
void Normalizer::clusters(std::string_view text, const Visit& visit) const {
  if (marks_.empty()) return;
  const char* const end = text.data() + text.size();
  const char* before = text.data();
  for (const char* at = before; at < end;) {
    if (static_cast<uint8_t>(*at) < 0x80) {
      before = at++;
      continue;
    }
    const char* const begin = at;
    if (!marks_[next_code_point(at)]) {
      before = begin;
      continue;
    }
    for (const char* next = at; at < end && marks_[next_code_point(next)];) at = next;
    visit(std::string_view(before, static_cast<size_t>(at - before)));
    before = at;  // if the text ends here, or before a character without marks
  }
}

std::string_view Normalizer::normalize(std::string_view text, std::string& buffer) {
  const char* copied = text.data();
  clusters(text, [&](std::string_view cluster) {
    if (copied == text.data()) buffer.clear();
    buffer.append(copied, cluster.data());
    copied = cluster.data() + cluster.size();
    const auto known = known_.find(key_.assign(cluster));
    if (known == known_.end())
      unknown_.insert(key_);
    else
      buffer.append(known->second);
  });
  if (copied == text.data()) return text;
  return buffer.append(copied, text.data() + text.size());
}

void Normalizer::learn(std::string cluster, std::string normalized) {
  known_.insert_or_assign(std::move(cluster), std::move(normalized));
}

size_t Normalizer::bytes_in_clusters(std::string_view text) const {
  size_t bytes = 0;
  clusters(text, [&](std::string_view cluster) { bytes += cluster.size(); });
  return bytes;
}

void Normalizer::begin() {
  unknown_.clear();
  if (known_.size() > kMaxClusters) known_.clear();
}

AddedTexts::AddedTexts(std::vector<Added> added) : added_(std::move(added)), may_begin_(1 << 16) {
  std::stable_sort(added_.begin(), added_.end(),
                   [](const Added& a, const Added& b) { return a.text.size() > b.text.size(); });
  for (const Added& token : added_) {
    if (token.text.empty()) throw std::invalid_argument("an added text is not empty");
    const auto byte = [&](size_t i) { return size_t{static_cast<uint8_t>(token.text[i])}; };
    if (beginnings_.find(token.text[0]) == std::string::npos) beginnings_ += token.text[0];
    if (token.text.size() > 1)
      may_begin_[byte(0) << 8 | byte(1)] = true;
    else
      std::fill_n(may_begin_.begin() + static_cast<ptrdiff_t>(byte(0) << 8), 256, true);
  }
}

const AddedTexts::Added* AddedTexts::at(std::string_view text) const {
  const auto byte = [&](size_t i) { return size_t{static_cast<uint8_t>(text[i])}; };
  if (text.size() > 1 && !may_begin_[byte(0) << 8 | byte(1)]) return nullptr;
  for (const Added& token : added_)
    if (text.substr(0, token.text.size()) == token.text) return &token;
  return nullptr;
}

template <typename Found, typename Between>
void AddedTexts::split(std::string_view text, const Found& found, const Between& between) const {
  size_t begin = 0;  // end of the last added text
  const auto next = [&](char beginning, size_t from) { return text.find(beginning, from); };
  std::vector<size_t> places(beginnings_.size());  // next occurrence of each beginning
  for (size_t i = 0; i < places.size(); ++i) places[i] = next(beginnings_[i], 0);
  while (true) {
    const auto nearest = std::min_element(places.begin(), places.end());
    if (nearest == places.end() || *nearest == std::string_view::npos) break;
    const size_t place = *nearest;
    size_t from = place + 1;
    if (const Added* const token = at(text.substr(place))) {
      if (begin < place) between(text.substr(begin, place - begin));
      found(token->id);
      begin = from = place + token->text.size();
    }
    for (size_t i = 0; i < places.size(); ++i)
      if (places[i] < from) places[i] = next(beginnings_[i], from);
  }
  if (begin < text.size()) between(text.substr(begin));
}

ByteLevel::ByteLevel(PreTokenizer words, Merges merges,
                     std::unordered_map<std::string, uint32_t> whole, AddedTexts added,
                     AddedTexts later, Normalizer normalizer, bool add_prefix_space)
    : words_(std::move(words)),
      merges_(std::move(merges)),
      whole_(std::move(whole)),
      added_(std::move(added)),
      later_(std::move(later)),
      normalizer_(std::move(normalizer)),
      add_prefix_space_(add_prefix_space) {}

size_t ByteLevel::room_for(const std::vector<std::string_view>& texts) const {
  size_t bytes = WordCache::kFew;
  for (const auto text : texts)
    bytes += text.size() + kGrowth * normalizer_.bytes_in_clusters(text);
  if (!add_prefix_space_) return bytes;
  return bytes + (added_.empty() && later_.empty() ? texts.size() : bytes);
}

size_t ByteLevel::encode(const std::vector<std::string_view>& texts, uint32_t* ids,
                         int64_t* lengths) {
  uint32_t* at = ids;
  num_pending_ = 0;  // an earlier call may have thrown
  for (const auto text : texts) {
    uint32_t* const after = encode_text(text, at);
    *lengths++ = after - at;
    at = after;
  }
  return static_cast<size_t>(at - ids);
}

uint32_t* ByteLevel::encode_text(std::string_view text, uint32_t* ids) {
  added_.split(
      text, [&](uint32_t id) { *ids++ = id; },
      [&](std::string_view between) { ids = encode_normalized(between, ids); });
  return ids;
}

uint32_t* ByteLevel::encode_normalized(std::string_view text, uint32_t* ids) {
  later_.split(
      normalizer_.normalize(text, normalized_), [&](uint32_t id) { *ids++ = id; },
      [&](std::string_view between) { ids = encode_between(between, ids); });
  return ids;
}

uint32_t* ByteLevel::encode_between(std::string_view text, uint32_t* ids) {
  if (add_prefix_space_ && !text.empty() && text[0] != ' ') {
    prefixed_.assign(1, ' ').append(text);
    text = prefixed_;
  }
  const char* const end = text.data() + text.size();
  words_.split(text, [&](std::string_view word) {
    PendingWord& pending = pending_[num_pending_++];
    pending.word = word;
    pending.line = nullptr;
    if (word.size() <= WordCache::kShort) {
      const auto key = key_of(word, end);
      auto& line = cache_.line_of(key);
      __builtin_prefetch(&line);
      pending.key = key;
      pending.line = &line;
    }
    if (num_pending_ == pending_.size()) ids = encode_pending(ids);
  });
  return encode_pending(ids);
}

uint32_t* ByteLevel::encode_pending(uint32_t* ids) {
  for (size_t i = 0; i < num_pending_; ++i) {
    const PendingWord& pending = pending_[i];
    const bool is_short = pending.line != nullptr;
    uint32_t* after =
        is_short ? cache_.write(pending.key, *pending.line, ids) : cache_.write(pending.word, ids);
    if (after == nullptr) {
      word_ids_.clear();
      const auto whole = whole_.empty() ? whole_.end() : whole_.find(std::string(pending.word));
      if (whole != whole_.end())
        word_ids_.push_back(whole->second);
      else
        merges_.encode(pending.word, word_ids_);
      if (is_short) {
        cache_.add(pending.key, *pending.line, word_ids_);
      } else {
        cache_.add(pending.word, word_ids_);
      }
      after = std::copy(word_ids_.begin(), word_ids_.end(), ids);
    }
    ids = after;
  }
  num_pending_ = 0;
  return ids;
}

}  // namespace tokamake
