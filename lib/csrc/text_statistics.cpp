#include "text_statistics.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "word_splitting.hpp"

namespace tokamake {

namespace {

// Hash of 64 bits, the same on each processor.
uint64_t long_hash(std::string_view text) {
  uint64_t hash = (text.size() + 1) * kHashFactor;
  for (; text.size() >= 8; text.remove_prefix(8)) {
    hash = (hash ^ load_bytes(text.data())) * kHashFactor;
    hash ^= hash >> 29;
  }
  uint64_t rest = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    rest |= uint64_t{static_cast<uint8_t>(text[i])} << (8 * i);
  }
  hash = (hash ^ rest) * kHashFactor;
  hash = (hash ^ hash >> 32) * 0xD6E8FEB86659FD93;
  return hash ^ hash >> 32;
}

// Counts of hashes, in a table with open addressing that is at most two thirds full.
class HashCounts {
 public:
  struct Entry {
    uint64_t hash;
    uint32_t first;  // number that the first caller gave
    uint32_t count;  // 0: the entry is free
  };

  void clear() {
    std::fill(entries_.begin(), entries_.end(), Entry{});
    used_ = 0;
  }

  // Counts a hash; returns its entry, which is valid until the next call.
  const Entry& add(uint64_t hash, uint32_t number = 0) {
    Entry* entry = &find(hash);
    if (entry->count == 0) {
      if (++used_ * 3 > entries_.size() * 2) {
        grow();
        entry = &find(hash);
      }
      *entry = {hash, number, 0};
    }
    ++entry->count;
    return *entry;
  }

 private:
  Entry& find(uint64_t hash) {
    auto at = static_cast<size_t>(hash * kHashFactor >> shift_);
    while (entries_[at].count != 0 && entries_[at].hash != hash) {
      at = (at + 1) & (entries_.size() - 1);
    }
    return entries_[at];
  }

  void grow() {
    std::vector<Entry> smaller(entries_.size() * 2);
    smaller.swap(entries_);
    --shift_;
    for (const Entry& entry : smaller) {
      if (entry.count != 0) find(entry.hash) = entry;
    }
  }

  int shift_ = 60;  // 64 - the logarithm of the number of entries
  size_t used_ = 0;
  std::vector<Entry> entries_ = std::vector<Entry>(16);
};

struct Duplicates {
  int64_t parts = 0;
  int64_t duplicates = 0;
  int64_t characters = 0;
};

// Parts of a text between runs of at least `min_feeds` line feeds that an earlier part equals.
Duplicates find_duplicates(std::string_view text, size_t min_feeds) {
  HashCounts counts;
  Duplicates found;
  const auto add = [&](std::string_view part) {
    ++found.parts;
    if (counts.add(long_hash(part)).count == 1) return;
    ++found.duplicates;
    found.characters += length_of(part);
  };
  size_t begin = 0;
  for (size_t at = text.find('\n'); at != text.npos; at = text.find('\n', at)) {
    const size_t feeds = std::min(text.find_first_not_of('\n', at), text.size()) - at;
    if (feeds >= min_feeds) {
      add(text.substr(begin, at - begin));
      begin = at + feeds;
    }
    at += feeds;
  }
  add(text.substr(begin));
  return found;
}

// N-grams of the words of a text. Word hashes are coefficients of a polynomial modulo 2^64: each
// n-gram's hash is a difference of two prefixes.
class Ngrams {
 public:
  Ngrams(std::string_view text, const uint8_t* flags) {
    uint64_t characters = 0;
    split_words(text, flags, [&](std::string_view word) {
      prefixes_.push_back(prefixes_.back() * kHashFactor + long_hash(word));
      characters += static_cast<uint64_t>(length_of(word));
      ends_.push_back(static_cast<uint32_t>(characters));
    });
    if (std::max<uint64_t>(characters, ends_.size()) > std::numeric_limits<uint32_t>::max()) {
      throw std::length_error("a text has more than 2**32 words or characters");
    }
  }

  size_t num_words() const { return ends_.size() - 1; }

  // Characters of all copies of the most frequent n-gram, with a space between words; of several,
  // the first one in the text.
  int64_t top(size_t n, HashCounts& counts) const {
    HashCounts::Entry best{0, 0, 0};
    const uint64_t factor = power(n);
    for (size_t i = 0; i + n <= num_words(); ++i) {
      const auto& entry = counts.add(hash(i, n, factor), static_cast<uint32_t>(i));
      if (entry.count > best.count || (entry.count == best.count && entry.first < best.first)) {
        best = entry;
      }
    }
    return best.count == 0 ? 0 : best.count * (characters(best.first, n) + int64_t(n) - 1);
  }

  // Characters of n-grams that occurred before. After such an n-gram, the next one begins behind
  // it.
  int64_t repeated(size_t n, HashCounts& counts) const {
    int64_t repeated = 0;
    const uint64_t factor = power(n);
    for (size_t i = 0; i + n <= num_words();) {
      if (counts.add(hash(i, n, factor)).count > 1) {
        repeated += characters(i, n);
        i += n;
      } else {
        ++i;
      }
    }
    return repeated;
  }

 private:
  static uint64_t power(size_t n) {
    uint64_t product = 1;
    while (n-- > 0) product *= kHashFactor;
    return product;
  }

  uint64_t hash(size_t i, size_t n, uint64_t factor) const {
    return prefixes_[i + n] - prefixes_[i] * factor;
  }

  int64_t characters(size_t i, size_t n) const { return int64_t{ends_[i + n]} - ends_[i]; }

  std::vector<uint64_t> prefixes_{0};
  std::vector<uint32_t> ends_{0};  // characters of the words up to each one
};

}  // namespace

WordStatistics word_statistics(std::string_view text, const uint8_t* flags,
                               const std::vector<std::string>& stop_words) {
  WordStatistics found;
  std::vector<uint8_t> seen(stop_words.size());
  split_words(text, flags, [&](std::string_view word) {
    int64_t characters = 0;
    uint8_t any = 0, all = 0xFF;
    for (const char* at = word.data(); at < word.data() + word.size(); ++characters) {
      const uint8_t flags_of = flags[next_code_point(at)];
      any |= flags_of;
      all &= flags_of;
    }
    ++found.words;
    found.alphabetic_words += (any & flag::kLetter) != 0;
    if (!(all & flag::kPunctuation)) {
      ++found.plain_words;
      found.plain_characters += characters;
    }
    for (size_t i = 0; i < seen.size(); ++i) seen[i] |= stop_words[i] == word;
  });
  found.stop_words = std::count(seen.begin(), seen.end(), 1);
  found.hashes = std::count(text.begin(), text.end(), '#');
  for (size_t at = 0; (at = text.find("...", at)) != text.npos; at += 3) ++found.ellipses;
  for (size_t at = 0; (at = text.find("\u2026", at)) != text.npos; at += 3) ++found.ellipses;
  split_lines(text, flags, [&](std::string_view line) {
    ++found.lines;
    line = strip(line, flags);
    found.bullet_lines += line.substr(0, 1) == "-" || line.substr(0, 3) == "\u2022";
    found.ellipsis_lines += ends_with(line, "...") || ends_with(line, "\u2026");
  });
  return found;
}

LineStatistics line_statistics(std::string_view text, const uint8_t* flags,
                               int64_t short_characters) {
  LineStatistics found;
  found.line_feeds = std::count(text.begin(), text.end(), '\n');
  found.characters = length_of(text) - found.line_feeds;
  split_words(text, flags, [&](std::string_view) { ++found.words; });
  HashCounts counts;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const auto line = text.substr(begin, end - begin);
    begin = end + 1;
    if (strip_left(line, flags).empty()) continue;
    const int64_t length = length_of(line);
    const char* last = previous(line.data() + line.size());
    ++found.lines;
    found.ended_lines += (flags[next_code_point(last)] & flag::kSentenceEnd) != 0;
    found.short_lines += length <= short_characters;
    if (counts.add(long_hash(line)).count > 1) found.duplicate_characters += length;
  }
  return found;
}

Repetition repetition(std::string_view text, const uint8_t* flags) {
  Repetition found;
  found.characters = length_of(text);
  const auto paragraphs = find_duplicates(strip(text, flags), 2);
  found.paragraphs = paragraphs.parts;
  found.duplicate_paragraphs = paragraphs.duplicates;
  found.duplicate_paragraph_characters = paragraphs.characters;
  const auto lines = find_duplicates(text, 1);
  found.lines = lines.parts;
  found.duplicate_lines = lines.duplicates;
  found.duplicate_line_characters = lines.characters;
  const Ngrams ngrams(text, flags);
  HashCounts counts;
  for (size_t n = kFirstTop; n <= kLongest; ++n) {
    counts.clear();
    if (n < kFirstRepeated) {
      found.top.push_back(ngrams.top(n, counts));
    } else {
      found.repeated.push_back(ngrams.repeated(n, counts));
    }
  }
  return found;
}

}  // namespace tokamake
