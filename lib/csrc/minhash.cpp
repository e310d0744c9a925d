#include "minhash.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "word_hashes.hpp"

namespace tokamake {

namespace {

// Compilers make vector code of these loops; the clone for the processor is chosen when the module
// is loaded. All clones give the same integers.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "sse4.1", "default"), optimize("O3")))
#endif
uint32_t minimum(const uint32_t* hashes, size_t size, uint32_t factor, uint32_t term) {
  uint32_t least = std::numeric_limits<uint32_t>::max();
  for (size_t i = 0; i < size; ++i) {
    const uint32_t value = hashes[i] * factor + term;
    least = value < least ? value : least;
  }
  return least;
}

uint32_t root_of(uint32_t* parents, uint32_t document) {
  while (parents[document] != document) {
    parents[document] = parents[parents[document]];
    document = parents[document];
  }
  return document;
}

}  // namespace

MinHash::MinHash(std::vector<uint32_t> characters, bool of_characters, size_t shingle, size_t bands,
                 size_t rows, uint64_t seed)
    : characters_(std::move(characters)),
      of_characters_(of_characters),
      shingle_(shingle),
      bands_(bands),
      rows_(rows) {
  if (shingle == 0 || bands == 0 || rows == 0)
    throw std::invalid_argument("a shingle, bands and rows must not be empty");
  for (size_t i = 0; i < bands * rows; ++i) {
    const uint64_t random = mixed(seed + (i + 1) * kHashFactor);
    factors_.push_back(static_cast<uint32_t>(random) | 1);  // odd: a permutation
    terms_.push_back(static_cast<uint32_t>(random >> 32));
  }
  minima_.resize(bands * rows);
}

// Fills units_ with the hashes of words, or of characters with a space between words.
void MinHash::hash_units(std::string_view text) {
  units_.clear();
  if (!of_characters_) {
    hash_words(text, characters_,
               [&](uint64_t hash, const char*, const char*) { units_.push_back(hash); });
    return;
  }
  bool is_after_word = false;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    const uint32_t character = next_character(at, characters_);
    if (character == kSeparator) {
      is_after_word = !units_.empty();
      continue;
    }
    if (is_after_word) units_.push_back(mixed(U' '));
    is_after_word = false;
    units_.push_back(mixed(character & ~kWordAlone));
  }
}

void MinHash::hash_shingles() {
  shingles_.clear();
  const size_t size = std::min(shingle_, units_.size());
  for (size_t first = 0; first + size <= units_.size(); ++first) {
    uint64_t hash = 0;
    for (size_t i = first; i < first + size; ++i) hash = (hash ^ units_[i]) * kHashFactor + 1;
    shingles_.push_back(static_cast<uint32_t>(mixed(hash) >> 32));
  }
}

void MinHash::sign(std::string_view text, uint64_t* keys) {
  hash_units(text);
  if (units_.empty()) {
    std::fill_n(keys, bands_, uint64_t{0});
    return;
  }
  hash_shingles();
  // Parts of the shingles stay in the first-level cache while all permutations read them.
  constexpr size_t kPart = 4096;
  std::fill(minima_.begin(), minima_.end(), std::numeric_limits<uint32_t>::max());
  for (size_t first = 0; first < shingles_.size(); first += kPart) {
    const size_t size = std::min(kPart, shingles_.size() - first);
    for (size_t i = 0; i < minima_.size(); ++i)
      minima_[i] =
          std::min(minima_[i], minimum(shingles_.data() + first, size, factors_[i], terms_[i]));
  }
  for (size_t band = 0; band < bands_; ++band) {
    uint64_t key = band + 1;
    for (size_t row = 0; row < rows_; ++row)
      key = mixed((key ^ minima_[band * rows_ + row]) * kHashFactor);
    keys[band] = std::max(key, uint64_t{1});
  }
}

void join_clusters(uint32_t* parents, size_t documents, const uint32_t* first,
                   const uint32_t* second, size_t pairs) {
  for (size_t i = 0; i < pairs; ++i) {
    if (first[i] >= documents || second[i] >= documents)
      throw std::invalid_argument("a document is out of range");
    const uint32_t a = root_of(parents, first[i]);
    const uint32_t b = root_of(parents, second[i]);
    // The smaller root stays, so that the order of pairs does not matter.
    parents[std::max(a, b)] = std::min(a, b);
  }
}

void resolve_clusters(uint32_t* parents, size_t documents) {
  // Parents come before their children, so one pass is enough.
  for (size_t i = 0; i < documents; ++i) parents[i] = parents[parents[i]];
}

}  // namespace tokamake
