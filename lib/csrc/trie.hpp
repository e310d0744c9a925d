// Words by their first bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tokamake {

class Trie {
 public:
  // Words with their numbers. The last one counts if two words are equal; empty words are left out.
  explicit Trie(std::vector<std::pair<std::string, uint32_t>> words);

  // Calls `visit` with the size and the number of each word with which a text begins, the shortest
  // first.
  template <typename Visit>
  void each_prefix(std::string_view text, const Visit& visit) const {
    const Node* node = &nodes_[0];
    for (size_t size = 0; size < text.size();) {
      const char* const labels = labels_.data() + node->first;
      const void* const label = std::memchr(labels, text[size], node->count);
      if (label == nullptr) return;
      node = &nodes_[node->first + static_cast<size_t>(static_cast<const char*>(label) - labels)];
      ++size;
      if (node->number != kNone) visit(size, node->number);
    }
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Node {
    uint32_t first = 0, count = 0;  // of its children
    uint32_t number = kNone;        // of the word that ends here
  };

  std::vector<Node> nodes_;
  std::string labels_;  // byte that leads to each node
};

}  // namespace tokamake
