#include "trie.hpp"

#include <algorithm>

namespace tokamake {

Trie::Trie(std::vector<std::pair<std::string, uint32_t>> words) : nodes_(1), labels_(1, '\0') {
  struct Range {  // the words of a node, which share their first `depth` bytes
    size_t begin, end, depth;
  };
  const auto by_text = [](const auto& a, const auto& b) { return a.first < b.first; };
  std::stable_sort(words.begin(), words.end(), by_text);
  std::vector<Range> ranges = {{0, words.size(), 0}};
  for (size_t node = 0; node < ranges.size(); ++node) {
    auto [at, end, depth] = ranges[node];
    for (; at < end && words[at].first.size() == depth; ++at)
      if (depth > 0) nodes_[node].number = words[at].second;
    nodes_[node].first = static_cast<uint32_t>(nodes_.size());
    while (at < end) {
      const char label = words[at].first[depth];
      size_t next = at;
      while (next < end && words[next].first[depth] == label) ++next;
      ranges.push_back({at, next, depth + 1});
      nodes_.emplace_back();
      labels_ += label;
      at = next;
    }
    nodes_[node].count = static_cast<uint32_t>(nodes_.size()) - nodes_[node].first;
  }
}

}  // namespace tokamake
