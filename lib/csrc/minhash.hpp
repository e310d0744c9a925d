// MinHash band keys of texts (Broder 1997; bands: Leskovec, Rajaraman, Ullman, Mining of Massive
// Datasets, 3.4), and clusters of documents that share a key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace tokamake {

// Texts become words, words become shingles, and shingles become one minimum per permutation.
// A band key is a hash of `rows` minima.
class MinHash {
 public:
  // `characters` has an entry for each code point up to its size; code points after it are words
  // of their own. A shingle has `shingle` consecutive words, or characters of the words with single
  // spaces between them.
  MinHash(std::vector<uint32_t> characters, bool of_characters, size_t shingle, size_t bands,
          size_t rows, uint64_t seed);

  size_t bands() const { return bands_; }

  // Writes bands() keys of a text of valid UTF-8, none of them 0; or zeros if it has no word.
  // Texts with fewer words than a shingle have one shingle.
  void sign(std::string_view text, uint64_t* keys);

 private:
  void hash_units(std::string_view text);
  void hash_shingles();

  std::vector<uint32_t> characters_;
  bool of_characters_;
  size_t shingle_, bands_, rows_;
  std::vector<uint32_t> factors_, terms_;  // of the permutations
  std::vector<uint64_t> units_;            // hashes of the words or characters of a text
  std::vector<uint32_t> shingles_;         // different hashes of its shingles
  std::vector<uint32_t> minima_;
};

// Joins the clusters of documents `first[i]` and `second[i]`. `parents` has the parent of each
// document, itself for a root. The root of a cluster is its smallest document.
void join_clusters(uint32_t* parents, size_t documents, const uint32_t* first,
                   const uint32_t* second, size_t pairs);

// Lets each document name its root.
void resolve_clusters(uint32_t* parents, size_t documents);

}  // namespace tokamake
