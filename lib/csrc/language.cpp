#include "language.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace tokamake {

namespace {

constexpr std::string_view kEndOfLine = "</s>", kLabel = "__label__";
constexpr double kLeast = 1e-5;
constexpr size_t kCentroids = 256;

constexpr uint32_t kHashOfNothing = 2166136261;

// FNV-1a. fastText extends the sign of a byte.
uint32_t hash_with(uint32_t hash, char byte) {
  return (hash ^ static_cast<uint32_t>(static_cast<int8_t>(byte))) * 16777619;
}

bool is_space(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r') || byte == '\0'; }

bool continues_character(char byte) { return (byte & 0xC0) == 0x80; }

bool starts_with(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}

void require(bool holds) {
  if (!holds) throw std::invalid_argument("no model of languages that this reader knows");
}

}  // namespace

class LanguageModel::File {
 public:
  explicit File(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  T next() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }

  template <typename T>
  std::vector<T> next(size_t size) {
    require(size <= bytes_.size());
    std::vector<T> values(size);
    std::memcpy(values.data(), take(size * sizeof(T)).data(), size * sizeof(T));
    return values;
  }

  std::string next_word() {
    const auto size = bytes_.find('\0');
    require(size != std::string_view::npos);
    std::string word(take(size + 1).substr(0, size));
    return word;
  }

  bool is_at_end() const { return bytes_.empty(); }

 private:
  std::string_view take(size_t size) {
    require(size <= bytes_.size());
    const auto taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }

  std::string_view bytes_;
};

struct LanguageModel::Sum {
  std::array<double, kLanguageWidth> values{};
  int64_t vectors = 0;

  void add(const Vector& vector, int64_t count = 1) {
    for (size_t i = 0; i < kLanguageWidth; ++i) values[i] += vector[i];
    vectors += count;
  }
};

// Sums of words. A word replaces another one with an equal end of its hash.
class LanguageModel::Cache {
 public:
  static constexpr size_t kLongestWord = 27;

  struct Slot {  // 96 bytes
    Vector sum;
    int32_t vectors;
    uint8_t size;
    std::array<char, kLongestWord> bytes;

    bool holds(std::string_view word) const {
      return size == word.size() && std::memcmp(bytes.data(), word.data(), size) == 0;
    }
  };

  Slot& operator[](uint32_t hash) { return slots_[(hash ^ (hash >> 16)) % slots_.size()]; }

 private:
  std::vector<Slot> slots_ = std::vector<Slot>(1 << 15);
};

LanguageModel::LanguageModel(std::string_view bytes) {
  File file(bytes);
  read_arguments(file);
  auto counts = read_dictionary(file);
  read_vectors(file);
  build_tree(file, std::move(counts));
  require(file.is_at_end());
}

LanguageModel::~LanguageModel() = default;

void LanguageModel::read_arguments(File& file) {
  require(file.next<int32_t>() == 793712314 && file.next<int32_t>() == 12);
  // Dimension, window, epochs, least count, negatives, n-grams of words, loss (1: hierarchical
  // softmax), model (3: supervised), buckets, bounds of n-grams of characters, rate of updates.
  const auto arguments = file.next<int32_t>(12);
  file.next<double>();  // threshold of sampling
  require(arguments[0] == kLanguageWidth && arguments[5] == 1 && arguments[6] == 1);
  require(arguments[7] == 3 && arguments[8] > 0 && arguments[8] <= 1 << 24);
  require(arguments[9] > 0 && arguments[10] >= arguments[9]);
  buckets_.assign(static_cast<size_t>(arguments[8]), -1);
  min_characters_ = static_cast<uint32_t>(arguments[9]);
  max_characters_ = static_cast<uint32_t>(arguments[10]);
}

// Returns the number of occurrences of each label.
std::vector<int64_t> LanguageModel::read_dictionary(File& file) {
  const auto entries = file.next<int32_t>();
  const auto words = file.next<int32_t>();
  const auto labels = file.next<int32_t>();
  file.next<int64_t>();  // tokens of the training data
  const auto kept_buckets = file.next<int64_t>();
  require(words > 0 && labels > 1 && entries == int64_t{words} + labels && kept_buckets >= 0);
  std::vector<int64_t> counts;
  for (int32_t i = 0; i < entries; ++i) {
    auto word = file.next_word();
    const auto count = file.next<int64_t>();
    const bool is_label = file.next<int8_t>() == 1;
    require(is_label == (i >= words));
    if (is_label) {
      require(starts_with(word, kLabel));
      labels_.push_back(word.substr(kLabel.size()));
      counts.push_back(count);
    } else {
      words_.emplace(std::move(word), i);
    }
  }
  require(words_.count(std::string(kEndOfLine)) == 1);
  for (int64_t i = 0; i < kept_buckets; ++i) {
    const auto bucket = file.next<int32_t>(), number = file.next<int32_t>();
    require(bucket >= 0 && static_cast<size_t>(bucket) < buckets_.size());
    require(number >= 0 && number < kept_buckets);
    buckets_[static_cast<size_t>(bucket)] = words + number;
  }
  vectors_.resize(static_cast<size_t>(words + kept_buckets));
  return counts;
}

// Product quantization: a code names the centroid of each part of a vector, another one its norm.
void LanguageModel::read_vectors(File& file) {
  require(file.next<uint8_t>() == 1 &&
          file.next<uint8_t>() == 1);  // the vectors are quantized, and their norms
  require(file.next<int64_t>() == static_cast<int64_t>(vectors_.size()));
  require(file.next<int64_t>() == kLanguageWidth);
  const auto codes = file.next<uint8_t>(static_cast<size_t>(file.next<int32_t>()));
  const auto shape = file.next<int32_t>(4);  // dimension, parts, width of a part, of the last one
  const auto parts = static_cast<size_t>(shape[1]), width = static_cast<size_t>(shape[2]);
  require(shape[0] == kLanguageWidth && shape[1] > 0 && shape[2] > 0 && shape[3] == shape[2]);
  require(parts * width == kLanguageWidth && codes.size() == parts * vectors_.size());
  const auto centroids = file.next<float>(kCentroids * kLanguageWidth);
  const auto norm_codes = file.next<uint8_t>(vectors_.size());
  require(file.next<int32_t>(4) == std::vector<int32_t>(4, 1));  // the shape, as above
  const auto norms = file.next<float>(kCentroids);
  for (size_t row = 0; row < vectors_.size(); ++row) {
    for (size_t i = 0; i < kLanguageWidth; ++i) {
      const size_t part = i / width, code = codes[row * parts + part];
      const float value = centroids[(part * kCentroids + code) * width + i % width];
      vectors_[row][i] = norms[norm_codes[row]] * value;
    }
  }
}

// Huffman's algorithm. Labels are in the order of falling counts; of equal counts, an inner node is
// taken before a label.
void LanguageModel::build_tree(File& file, std::vector<int64_t> counts) {
  const size_t leaves = counts.size();
  require(file.next<uint8_t>() == 0);  // the weights are not quantized
  require(file.next<int64_t>() == static_cast<int64_t>(leaves));
  require(file.next<int64_t>() == kLanguageWidth);
  size_t leaves_left = leaves, next_inner = leaves;
  const auto take = [&] {
    const bool has_inner = next_inner < counts.size();
    if (leaves_left > 0 && (!has_inner || counts[leaves_left - 1] < counts[next_inner])) {
      return --leaves_left;
    }
    return next_inner++;
  };
  while (nodes_.size() < leaves - 1) {
    const size_t left = take(), right = take();
    nodes_.push_back({left, right, file.next<Vector>()});
    counts.push_back(counts[left] + counts[right]);
  }
  file.next<Vector>();  // fastText has a row for each label, and uses one less
}

std::vector<double> LanguageModel::scores(std::string_view text) const {
  std::unique_ptr<Cache> cache;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      cache = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!cache) cache = std::make_unique<Cache>();
  Sum sum;
  add_words(text, *cache, sum);
  add_word(kEndOfLine, sum);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(cache));
  }
  const size_t leaves = labels_.size();
  std::vector<double> chances(leaves + nodes_.size());
  chances.back() = 1;
  for (size_t i = nodes_.size(); i-- > 0;) {
    const auto& node = nodes_[i];
    double product = 0;
    for (size_t k = 0; k < kLanguageWidth; ++k) product += node.weights[k] * sum.values[k];
    const double right = 1 / (1 + std::exp(-product / static_cast<double>(sum.vectors)));
    chances[node.left] = chances[leaves + i] * (1 - right + kLeast);
    chances[node.right] = chances[leaves + i] * (right + kLeast);
  }
  chances.resize(leaves);
  for (auto& chance : chances) chance = chance < kLeast ? 0 : chance;
  return chances;
}

void LanguageModel::add_words(std::string_view text, Cache& cache, Sum& sum) const {
  for (size_t at = 0; at < text.size();) {
    const size_t start = at;
    uint32_t hash = kHashOfNothing;
    bool is_end = false;
    for (; at < text.size() && !is_space(text[at]); ++at) {
      is_end = text[at] == '<' && starts_with(text.substr(at), kEndOfLine);
      if (is_end) break;
      hash = hash_with(hash, text[at]);
    }
    if (at > start) add_cached(text.substr(start, at - start), hash, cache, sum);
    at += is_end ? kEndOfLine.size() : 1;
  }
}

// Adds the sum of a short word, rounded to floats, also when it is new: the cache changes nothing.
void LanguageModel::add_cached(std::string_view word, uint32_t hash, Cache& cache, Sum& sum) const {
  if (word.size() > Cache::kLongestWord) {
    add_word(word, sum);
    return;
  }
  auto& slot = cache[hash];
  if (!slot.holds(word)) {
    Sum alone;
    add_word(word, alone);
    std::copy(alone.values.begin(), alone.values.end(), slot.sum.begin());
    slot.vectors = static_cast<int32_t>(alone.vectors);
    slot.size = static_cast<uint8_t>(word.size());
    std::copy(word.begin(), word.end(), slot.bytes.begin());
  }
  sum.add(slot.sum, slot.vectors);
}

void LanguageModel::add_word(std::string_view word, Sum& sum) const {
  if (starts_with(word, kLabel)) return;  // fastText takes it for the label of the text
  const auto known = words_.find(std::string(word));
  if (known != words_.end()) sum.add(vectors_[known->second]);
  if (word != kEndOfLine) add_ngrams("<" + std::string(word) + ">", sum);
}

// n-grams of characters of a word between < and >. These two alone are none.
void LanguageModel::add_ngrams(std::string_view word, Sum& sum) const {
  for (size_t start = 0; start < word.size(); ++start) {
    if (continues_character(word[start])) continue;
    uint32_t hash = kHashOfNothing;
    size_t end = start;
    for (uint32_t characters = 1; characters <= max_characters_ && end < word.size();
         ++characters) {
      do {
        hash = hash_with(hash, word[end++]);
      } while (end < word.size() && continues_character(word[end]));
      const bool is_mark = characters == 1 && (start == 0 || end == word.size());
      if (characters < min_characters_ || is_mark) continue;
      const int32_t number = buckets_[hash % buckets_.size()];
      if (number >= 0) sum.add(vectors_[static_cast<size_t>(number)]);
    }
  }
}

}  // namespace tokamake
