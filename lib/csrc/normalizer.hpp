// Normalization of texts, by tables for single characters and by Python for the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tokamake {

// Replaces characters one by one, and sorts marks as Unicode's canonical ordering does.
class CharacterMap {
 public:
  static constexpr uint8_t kSeparates = 255;  // rank: marks are not sorted across it

  CharacterMap() = default;
  // Both tables are for code points from 0 to 0x10FFFF. `numbers` has the text of each in `texts`;
  // 0: it stays. `ranks` has 0 for all but marks, which are sorted by rank; empty: none are sorted.
  CharacterMap(std::vector<uint32_t> numbers, std::vector<std::string> texts,
               std::vector<uint8_t> ranks);

  bool empty() const { return numbers_.empty(); }

  // Returns the text with its characters replaced; it may use `buffer`.
  std::string_view apply(std::string_view text, std::string& buffer) const;

  // Upper bound of the bytes for each byte of a text.
  size_t growth() const { return growth_; }

 private:
  void append(std::string_view piece, std::string& text, size_t& marks) const;
  // Sorts the marks from a place to the end of the text.
  void sort_marks(std::string& text, size_t begin) const;

  std::vector<uint32_t> numbers_;
  std::vector<std::string> texts_;
  std::vector<uint8_t> ranks_;
  size_t growth_ = 1;
};

// Normalizes texts by a map, then by clusters, and then by another map.
//
// A cluster is marked characters with the one before them. Text outside of clusters is normalized,
// and no cluster depends on text around it.
class Normalizer {
 public:
  // A mark of a character that joins the next one: in text, that is in its cluster, too. A word
  // that has such a character is one cluster.
  static constexpr uint8_t kJoins = 2;

  // `marks` has a byte for each code point from 0 to 0x10FFFF, and is empty if nothing is marked.
  Normalizer(CharacterMap before, std::vector<uint8_t> marks, CharacterMap after);

  // Returns the normalized text, valid until the next call. Notes unknown clusters.
  std::string_view normalize(std::string_view text);

  // The same for a word that no other word changes. If anything is marked, maps are not used. Sets
  // `is_known` to whether all clusters are known.
  std::string_view normalize_word(std::string_view word, bool& is_known);

  // Throws if the normalized text is longer than `room_for` expects.
  void learn(const std::string& cluster, std::string normalized);

  // Upper bound of the bytes of a normalized text.
  size_t room_for(std::string_view text) const;

  const std::unordered_set<std::string>& unknown() const { return unknown_; }
  void forget_unknown() { unknown_.clear(); }
  // Forgets unknown and long clusters, and all if they take much memory.
  void trim();

 private:
  template <typename Visit>
  void clusters(std::string_view text, const Visit& visit) const;
  // Normalized text of a cluster, or null.
  const std::string* find(std::string_view cluster);
  // Upper bound of the bytes of a text whose clusters are normalized.
  size_t room_for_clusters(std::string_view text) const;
  std::string_view replace_clusters(std::string_view text, std::string& buffer);

  CharacterMap before_, after_;
  std::vector<uint8_t> marks_;
  std::unordered_map<std::string, std::string> known_;
  std::unordered_map<std::string, std::string> known_once_;  // long ones, until `trim`
  size_t known_bytes_ = 0;
  std::unordered_set<std::string> unknown_;
  std::string key_, first_, second_;
};

}  // namespace tokamake
