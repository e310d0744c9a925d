#include "words.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "text.hpp"

namespace tokamake {

namespace {

constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr size_t kMinSlots = size_t{1} << 16;

}  // namespace

Words::Words(std::vector<uint8_t> kinds, std::vector<std::string> whole, size_t capacity)
    : kinds_(std::move(kinds)), whole_(std::move(whole)), capacity_(capacity) {
  if (kinds_.size() != 0x110000)
    throw std::invalid_argument("the table has an entry for each of 0x110000 code points");
  for (const auto& text : whole_) {
    if (text.empty()) throw std::invalid_argument("a text to keep whole is not empty");
    const char* at = text.data();
    kinds_[next_code_point(at)] |= kMayBegin;
  }
  clear();
}

void Words::clear() {
  used_ = 0;
  blocks_.clear();
  entries_.clear();
  ids_.clear();
  slots_.assign(kMinSlots, 0);
}

void Words::split(const std::vector<std::string_view>& texts) {
  if (!finished_ || used_ > capacity_) clear();
  finished_ = false;
  latest_.clear();
  text_ends_.clear();
  missing_.clear();
  first_missing_ = entries_.size();
  for (const auto text : texts) {
    split_text(text);
    text_ends_.push_back(latest_.size());
  }
}

void Words::split_text(std::string_view text) {
  const char* at = text.data();
  const char* const end = at + text.size();
  const char* word = at;           // start of the current word
  const char* run = at;            // start of the current text without spaces
  size_t before = latest_.size();  // number of words before it
  bool whole = false;              // it is one word
  const auto end_word = [&](const char* here) {
    if (here != word && !whole) add(word, here);
  };
  const auto end_run = [&](const char* here) {
    end_word(here);
    if (whole) add(run, here);
  };
  while (at != end) {
    const char* here = at;
    const uint8_t kind = kinds_[next_code_point(at)];
    if (kind == kInside) continue;
    if (kind & kSpace) {
      end_run(here);
      word = run = at;
      before = latest_.size();
      whole = false;
      continue;
    }
    if (kind & kMayBegin && !whole && is_whole(here, end)) {
      whole = true;
      latest_.resize(before);
    }
    if (kind & kAlone) {
      end_word(here);
      if (!whole) add(here, at);
      word = at;
    }
  }
  end_run(end);
}

bool Words::is_whole(const char* at, const char* end) const {
  const std::string_view rest(at, static_cast<size_t>(end - at));
  return std::any_of(whole_.begin(), whole_.end(),
                     [&](const std::string& text) { return rest.substr(0, text.size()) == text; });
}

void Words::add(const char* begin, const char* end) {
  const std::string_view word(begin, static_cast<size_t>(end - begin));
  const uint32_t hash = hash_of(word);
  size_t slot = hash & (slots_.size() - 1);
  for (; slots_[slot] != 0; slot = (slot + 1) & (slots_.size() - 1)) {
    const Entry& entry = entries_[slots_[slot] - 1];
    if (entry.hash == hash && entry.word == word) {
      latest_.push_back(slots_[slot] - 1);
      return;
    }
  }
  if (entries_.size() >= std::numeric_limits<uint32_t>::max() - 1)
    throw std::length_error("too many different words at once");
  const std::string_view kept(keep(word), word.size());
  latest_.push_back(static_cast<uint32_t>(entries_.size()));
  missing_.push_back(kept);
  entries_.push_back({kept, 0, 0, hash});
  slots_[slot] = static_cast<uint32_t>(entries_.size());
  used_ += word.size() + sizeof(Entry) + 4 * sizeof(uint32_t);
  if (entries_.size() * 2 > slots_.size()) grow();
}

void Words::grow() {
  slots_.assign(slots_.size() * 2, 0);
  for (size_t number = 0; number < entries_.size(); ++number) {
    size_t slot = entries_[number].hash & (slots_.size() - 1);
    while (slots_[slot] != 0) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = static_cast<uint32_t>(number + 1);
  }
}

const char* Words::keep(std::string_view word) {
  if (blocks_.empty() || blocks_.back().capacity() - blocks_.back().size() < word.size()) {
    blocks_.emplace_back();
    blocks_.back().reserve(std::max(kBlockBytes, word.size()));
  }
  auto& block = blocks_.back();
  block.append(word);
  return block.data() + block.size() - word.size();
}

void Words::finish(const uint32_t* ids, int64_t size, const int64_t* lengths, int64_t words) {
  if (finished_ || words != static_cast<int64_t>(missing_.size()))
    throw std::invalid_argument("give the tokens of the missing words, once");
  const uint64_t before = ids_.size();
  uint64_t first = before;
  for (int64_t i = 0; i < words; ++i) {
    if (lengths[i] < 0 || lengths[i] > size - static_cast<int64_t>(first - before))
      throw std::invalid_argument("lengths do not add up to the tokens");
    Entry& entry = entries_[first_missing_ + static_cast<size_t>(i)];
    entry.first_id = first;
    entry.num_ids = static_cast<uint32_t>(lengths[i]);
    first += static_cast<uint64_t>(lengths[i]);
  }
  if (static_cast<int64_t>(first - before) != size)
    throw std::invalid_argument("lengths do not add up to the tokens");
  ids_.insert(ids_.end(), ids, ids + size);
  used_ += static_cast<size_t>(size) * sizeof(uint32_t);
  finished_ = true;
}

int64_t Words::num_tokens() const {
  int64_t tokens = 0;
  for (const uint32_t number : latest_) tokens += entries_[number].num_ids;
  return tokens;
}

void Words::write(uint32_t* ids, int64_t* lengths) const {
  size_t word = 0;
  for (const size_t text_end : text_ends_) {
    const uint32_t* const begin = ids;
    for (; word < text_end; ++word) {
      const Entry& entry = entries_[latest_[word]];
      const uint32_t* from = ids_.data() + entry.first_id;
      for (uint32_t i = 0; i < entry.num_ids; ++i) *ids++ = from[i];
    }
    *lengths++ = ids - begin;
  }
}

}  // namespace tokamake
