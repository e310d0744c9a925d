// Words by their first bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tokamake {

// Double-array trie (Aoe 1989): the child of a node for a byte is at place `base ^ byte`. Each node
// with children has a base of its own, so the byte alone tells whose child a place holds.
class Trie {
 public:
  // Words with their numbers. The last one counts if two words are equal; empty words are left out.
  explicit Trie(std::vector<std::pair<std::string, uint32_t>> words);

  // Calls `visit` with the size of each beginning of a text with which any word begins, the
  // shortest first, and with the number of the word that it is, plus 1; 0: it is none.
  template <typename Visit>
  void each_beginning(std::string_view text, const Visit& visit) const {
    uint32_t base = nodes_[0].base;
    for (size_t size = 0; size < text.size();) {
      const auto byte = static_cast<uint8_t>(text[size]);
      const Node& node = nodes_[base ^ byte];
      if (node.label != byte + 1u) return;
      ++size;
      base = node.base;
      visit(size, node.number);
    }
  }

 private:
  static constexpr uint32_t kBits = 23;  // of a base
  struct Node {
    Node() : base(0), label(0) {}

    uint32_t base : kBits;  // 0: no children
    uint32_t label : 9;     // byte that leads here, plus 1; 0: free
    uint32_t number = 0;    // of the word that ends here, plus 1; 0: none
  };

  // Finds a base whose places for some bytes are free.
  uint32_t find_base(const std::string& bytes);

  std::vector<Node> nodes_;
  std::vector<bool> bases_;  // whether each has a node
  size_t first_ = 1;         // place from which to search
};

}  // namespace tokamake
