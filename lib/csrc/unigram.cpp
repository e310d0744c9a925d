#include "unigram.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "text.hpp"

namespace tokamake {

namespace {

constexpr std::string_view kMark = "\u2581";
constexpr double kPenalty = 10;  // of an unknown character, below the lowest score

std::vector<std::pair<std::string, uint32_t>> numbered(const Unigram::Pieces& pieces) {
  std::vector<std::pair<std::string, uint32_t>> words;
  for (const auto& piece : pieces)
    words.emplace_back(piece.first, static_cast<uint32_t>(words.size()));
  return words;
}

}  // namespace

Unigram::Unigram(const Pieces& pieces, std::optional<uint32_t> unknown, std::vector<uint32_t> bytes,
                 Marks marks, std::vector<uint8_t> spaces)
    : trie_(numbered(pieces)),
      words_(pieces.size()),
      unknown_(unknown),
      bytes_(std::move(bytes)),
      marks_(marks),
      spaces_(std::move(spaces)) {
  if (marks_ == Marks::kWords && spaces_.size() != 0x110000)
    throw std::invalid_argument("there is an entry for each of 0x110000 code points");
  if (!bytes_.empty() && bytes_.size() != 256)
    throw std::invalid_argument("bytes must have a token for each of 256 bytes");
  double lowest = std::numeric_limits<double>::infinity();
  for (size_t number = pieces.size(); number-- > 0;) {  // the last one of equal pieces counts
    const auto& [text, score] = pieces[number];
    lowest = std::min(lowest, score);
    if (!text.empty() && words_.find(text) == nullptr)
      words_.add(text, {static_cast<uint32_t>(number)});
  }
  for (const auto& piece : pieces) scores_.push_back(piece.second);
  unknown_score_ = lowest - kPenalty;
}

std::string Unigram::marked(std::string_view text) const {
  std::string result;
  const char* const end = text.data() + text.size();
  bool begins = marks_ == Marks::kWords;  // whether the next character begins a word
  for (const char* at = text.data(); at < end;) {
    const char* const from = at;
    const uint32_t point = next_code_point(at);
    const std::string_view character(from, static_cast<size_t>(at - from));
    if (marks_ == Marks::kSpaces) {
      result.append(point == ' ' ? kMark : character);
    } else if (spaces_[point]) {
      begins = true;
    } else {
      if (begins && character != kMark) result.append(kMark);
      result.append(character);
      begins = false;
    }
  }
  return result;
}

void Unigram::encode(std::string_view text, std::vector<uint32_t>& ids) const {
  ids.clear();
  if (marks_ == Marks::kNone) return encode_word(text, ids);
  const std::string written = marked(text);
  for (size_t begin = 0; begin < written.size();) {
    const size_t end = std::min(written.find(kMark, begin + 1), written.size());
    encode_word(std::string_view(written).substr(begin, end - begin), ids);
    begin = end;
  }
}

void Unigram::encode_word(std::string_view word, std::vector<uint32_t>& ids) const {
  struct Best {  // piece that ends here
    double score = 0;
    size_t begin = SIZE_MAX;
    uint32_t id = 0;
  };
  std::vector<Best> best(word.size() + 1);
  size_t size = 0;  // of the character
  for (size_t begin = 0; begin < word.size(); begin += size) {
    size = 1;
    while (marks_ != Marks::kNone && begin + size < word.size() &&
           (word[begin + size] & 0xC0) == 0x80)
      ++size;
    bool has_character = false;
    const auto offer = [&](size_t end, double score, uint32_t id) {
      Best& known = best[end];
      score += best[begin].score;
      if (known.begin == SIZE_MAX || score > known.score) known = {score, begin, id};
    };
    trie_.each_prefix(word.substr(begin), [&](size_t piece, uint32_t id) {
      offer(begin + piece, scores_[id], id);
      has_character = has_character || piece == size;
    });
    if (has_character) continue;
    if (!unknown_) throw std::invalid_argument("a character is no piece");
    offer(begin + size, unknown_score_, *unknown_);
  }
  std::vector<std::pair<std::string_view, uint32_t>> pieces;
  for (size_t end = word.size(); end > 0;) {
    const Best& last = best[end];
    size_t begin = last.begin;
    while (unknown_ && last.id == *unknown_ && begin > 0 && best[begin].id == *unknown_)
      begin = best[begin].begin;  // adjacent unknown pieces are one
    pieces.emplace_back(word.substr(begin, end - begin), last.id);
    end = begin;
  }
  for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
    if (unknown_ && piece->second == *unknown_)
      append_unknown(piece->first, ids);
    else
      ids.push_back(piece->second);
  }
}

void Unigram::append_unknown(std::string_view text, std::vector<uint32_t>& ids) const {
  if (const auto* const known = words_.find(text))
    ids.push_back(*words_.ids(*known));
  else if (bytes_.empty())
    ids.push_back(*unknown_);
  else
    for (const char byte : text) ids.push_back(bytes_[static_cast<uint8_t>(byte)]);
}

}  // namespace tokamake
