#include "trie.hpp"

#include <algorithm>
#include <stdexcept>

namespace tokamake {

namespace {

constexpr size_t kBlock = 256;    // places of a base
constexpr int kTries = 16;        // free places that are tried before they are given up
constexpr uint32_t kTaken = 511;  // label of the root, to which no byte leads

}  // namespace

Trie::Trie(std::vector<std::pair<std::string, uint32_t>> words) : nodes_(kBlock), bases_(kBlock) {
  struct Range {  // the words of a node, which share their first `depth` bytes
    uint32_t node;
    size_t begin, end, depth;
  };
  const auto by_text = [](const auto& a, const auto& b) { return a.first < b.first; };
  std::stable_sort(words.begin(), words.end(), by_text);
  std::vector<Range> ranges = {{0, 0, words.size(), 0}};
  nodes_[0].label = kTaken;
  while (!ranges.empty()) {
    const auto [node, begin, end, depth] = ranges.back();
    ranges.pop_back();
    size_t at = begin;
    for (; at < end && words[at].first.size() == depth; ++at)
      if (depth > 0) nodes_[node].number = words[at].second + 1;
    std::string bytes;
    for (size_t next = at; next < end; ++next)
      if (bytes.empty() || bytes.back() != words[next].first[depth])
        bytes += words[next].first[depth];
    if (bytes.empty()) continue;
    const uint32_t base = find_base(bytes);
    nodes_[node].base = base;
    for (const char label : bytes) {
      const auto byte = static_cast<uint8_t>(label);
      nodes_[base ^ byte].label = byte + 1u;
      const size_t from = at;
      while (at < end && words[at].first[depth] == label) ++at;
      ranges.push_back({base ^ byte, from, at, depth + 1});
    }
  }
}

uint32_t Trie::find_base(const std::string& bytes) {
  const auto first = static_cast<uint8_t>(bytes[0]);
  int tries = 0;
  for (size_t place = first_;; ++place) {
    if (place == nodes_.size()) {
      if (place + kBlock > size_t{1} << kBits) throw std::length_error("the words are too long");
      nodes_.resize(place + kBlock);
      bases_.resize(place + kBlock);
    }
    if (nodes_[place].label != 0) continue;
    if (++tries == kTries) first_ = place;
    const size_t base = place ^ first;
    const auto is_free = [&](char byte) {
      return nodes_[base ^ static_cast<uint8_t>(byte)].label == 0;
    };
    if (base == 0 || bases_[base] || !std::all_of(bytes.begin(), bytes.end(), is_free)) continue;
    bases_[base] = true;
    return static_cast<uint32_t>(base);
  }
}

}  // namespace tokamake
