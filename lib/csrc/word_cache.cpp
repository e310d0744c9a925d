#include "word_cache.hpp"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "text.hpp"

namespace tokamake {

namespace {

constexpr size_t kHugePage = size_t{1} << 21;
constexpr int kLineBits = 18;
constexpr size_t kLines = size_t{1} << kLineBits;  // 16 MiB
constexpr size_t kWords = size_t{1} << 19;         // of the table, which takes 32 MiB
constexpr size_t kLongest = 1024;                  // bytes; longer words are rare and not cached

}  // namespace

WordTable::WordTable(size_t capacity) : capacity_(capacity) {
  size_t size = 2;
  while (size < 2 * capacity) size *= 2;
  entries_.resize(size);
  texts_.assign(8 * capacity, '\0');  // touches the memory, too
  ids_.assign(4 * capacity, 0);
  texts_.clear();
  ids_.clear();
}

size_t WordTable::place_of(std::string_view word, uint32_t hash) const {
  size_t at = hash & (entries_.size() - 1);
  for (; entries_[at].size != 0; at = (at + 1) & (entries_.size() - 1)) {
    const Entry& entry = entries_[at];
    if (entry.hash == hash && word == std::string_view(texts_.data() + entry.text, entry.size))
      break;
  }
  return at;
}

const WordTable::Entry* WordTable::find(std::string_view word) const {
  const Entry& entry = entries_[place_of(word, hash_of(word))];
  return entry.size == 0 ? nullptr : &entry;
}

bool WordTable::has_room(size_t bytes, size_t num_ids) const {
  return used_ < capacity_ && texts_.size() + bytes <= texts_.capacity() &&
         ids_.size() + num_ids <= ids_.capacity();
}

const WordTable::Entry& WordTable::add(std::string_view word, const std::vector<uint32_t>& ids) {
  const uint32_t hash = hash_of(word);
  Entry& entry = entries_[place_of(word, hash)];
  entry = {hash, static_cast<uint32_t>(texts_.size()), static_cast<uint32_t>(word.size()),
           static_cast<uint32_t>(ids_.size()), static_cast<uint32_t>(ids.size())};
  ++used_;
  texts_.append(word);
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  return entry;
}

void WordTable::clear() {
  std::fill(entries_.begin(), entries_.end(), Entry{});
  used_ = 0;
  texts_.clear();
  ids_.clear();
}

WordCache::WordCache() : table_(kWords) {
  void* memory = std::aligned_alloc(kHugePage, kLines * sizeof(Line));
  if (memory == nullptr) throw std::bad_alloc();
#ifdef __linux__
  // With small pages most look-ups would also miss the TLB.
  madvise(memory, kLines * sizeof(Line), MADV_HUGEPAGE);
#endif
  lines_.reset(static_cast<Line*>(memory));
  std::uninitialized_fill_n(lines_.get(), kLines, Line{});
}

void WordCache::Free::operator()(Line* lines) const { std::free(lines); }

WordCache::Line& WordCache::line_of(Key key) const {
  uint64_t hash = (key.first ^ (key.rest * kHashFactor)) * kHashFactor;
  hash ^= hash >> 32;
  return lines_[hash * kHashFactor >> (64 - kLineBits)];
}

uint32_t* WordCache::write(Key key, const Line& line, uint32_t* out, const uint32_t* end) const {
  const auto differs = [&](const Key& other) {
    return (other.first ^ key.first) | (other.rest ^ key.rest);
  };
  // Which of both it is cannot be predicted, so there is no branch.
  const uint64_t difference = differs(line.latest.key);
  const Short& word = difference == 0 ? line.latest : line.earlier;
  if (difference != 0 && differs(line.earlier.key) != 0) return nullptr;
  if (word.count > kFew)
    return copy_tokens(table_.ids({0, 0, 0, word.ids[0], 0}), word.count, out, end);
  std::memcpy(out, word.ids, sizeof word.ids);  // a copy of fixed size is faster
  return out + word.count;
}

uint32_t* WordCache::write(std::string_view word, uint32_t* out, const uint32_t* end) const {
  const WordTable::Entry* const entry = table_.find(word);
  return entry == nullptr ? nullptr : copy_tokens(table_.ids(*entry), entry->count, out, end);
}

void WordCache::add(std::string_view word, const std::vector<uint32_t>& ids) {
  if (word.size() > kLongest) return;
  if (!table_.has_room(word.size(), ids.size())) {
    table_.clear();
    std::fill_n(lines_.get(), kLines, Line{});
  }
  table_.add(word, ids);
}

void WordCache::recall(std::string_view word, Key key, Line& line) {
  const WordTable::Entry& entry = *table_.find(word);
  Short copy;
  copy.key = key;
  copy.count = entry.count;
  if (entry.count <= kFew)
    std::copy_n(table_.ids(entry), entry.count, copy.ids);
  else
    copy.ids[0] = entry.id;
  line.earlier = line.latest;
  line.latest = copy;
}

}  // namespace tokamake
