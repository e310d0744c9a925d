// Scores the language of a text with a model of fastText, such as lid.176.ftz.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tokamake {

constexpr size_t kLanguageWidth = 16;  // of the model's vectors

// Joulin et al., 2016, https://arxiv.org/abs/1607.01759: the mean of the vectors of a text's words
// and of their n-grams of characters goes through a hierarchical softmax over the labels.
class LanguageModel {
 public:
  // Reads a quantized, supervised model: file format 12 with vectors of 16 numbers, n-grams of
  // characters, none of words, and a hierarchical softmax. Throws std::invalid_argument for any
  // other file, and if the file is too short.
  explicit LanguageModel(std::string_view file);
  ~LanguageModel();

  const std::vector<std::string>& labels() const { return labels_; }

  // Probability of each label, as fastText computes it: 1e-5 is added to each factor, and
  // probabilities below 1e-5 are 0. `text` is UTF-8; a line feed or </s> only separates words. Any
  // number of threads may call it. The result depends on nothing but the text.
  std::vector<double> scores(std::string_view text) const;

 private:
  using Vector = std::array<float, kLanguageWidth>;
  class File;
  class Cache;
  struct Sum;
  struct Node {  // of the tree of labels: leaves have the numbers of the labels
    size_t left, right;
    Vector weights;
  };

  void read_arguments(File& file);
  std::vector<int64_t> read_dictionary(File& file);
  void read_vectors(File& file);
  void build_tree(File& file, std::vector<int64_t> counts);
  void add_words(std::string_view text, Cache& cache, Sum& sum) const;
  void add_cached(std::string_view word, uint32_t hash, Cache& cache, Sum& sum) const;
  void add_word(std::string_view word, Sum& sum) const;
  void add_ngrams(std::string_view word, Sum& sum) const;

  uint32_t min_characters_ = 0, max_characters_ = 0;  // of n-grams
  std::vector<std::string> labels_;
  std::unordered_map<std::string, size_t> words_;  // number of each word's vector
  std::vector<int32_t> buckets_;  // hash of an n-gram -> number of its vector, or -1
  std::vector<Vector> vectors_;
  std::vector<Node> nodes_;  // inner nodes, children first: the last one is the root
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Cache>> idle_;  // as many as threads ran at once
};

}  // namespace tokamake
