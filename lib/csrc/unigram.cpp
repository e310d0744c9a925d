#include "unigram.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "text.hpp"

namespace tokamake {

namespace {

constexpr std::string_view kMark = "\u2581";
constexpr double kPenalty = 10;  // of an unknown character, below the lowest score
constexpr double kNever = -std::numeric_limits<double>::infinity();

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
  scores_.push_back(kNever);
  for (const auto& piece : pieces) {
    if (!std::isfinite(piece.second)) throw std::invalid_argument("a score is not finite");
    scores_.push_back(piece.second);
  }
  unknown_score_ = lowest - kPenalty;
}

std::string Unigram::marked(std::string_view text) const {
  std::string result;
  result.reserve(text.size() + kMark.size());
  const bool is_spaced = text.substr(0, 1) == " ";
  const std::string_view rest = text.substr(is_spaced);
  const auto is_plain = [&](char c) {
    return static_cast<uint8_t>(c - 0x21) < 0x5F &&
           (spaces_.empty() || !spaces_[static_cast<uint8_t>(c)]);
  };
  if (!rest.empty() && std::all_of(rest.begin(), rest.end(), is_plain)) {
    if (is_spaced || marks_ == Marks::kWords) result.append(kMark);
    return result.append(rest);
  }
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
  struct Piece {  // the best one that ends at a place, later the chosen one that begins there
    double score;
    uint32_t other, id;  // `other` is its other end
  };
  if (word.size() > UINT32_MAX) throw std::length_error("a word has 4 GB or more");
  std::array<Piece, 256> few;
  std::vector<Piece> many;  // of a long word
  if (word.size() >= few.size()) many.resize(word.size() + 1);
  Piece* const best = many.empty() ? few.data() : many.data();
  std::fill_n(best, word.size() + 1, Piece{kNever, 0, 0});
  best[0].score = 0;
  size_t size = 0;  // of the character
  for (size_t begin = 0; begin < word.size(); begin += size) {
    size = 1;
    while (marks_ != Marks::kNone && begin + size < word.size() &&
           (word[begin + size] & 0xC0) == 0x80)
      ++size;
    bool has_character = false;
    const double before = best[begin].score;
    const auto offer = [&](size_t piece, double score, uint32_t id) {
      Piece& known = best[begin + piece];
      const Piece offered = {before + score, static_cast<uint32_t>(begin), id};
      known = offered.score > known.score ? offered : known;  // without branches
    };
    trie_.each_beginning(word.substr(begin), [&](size_t piece, uint32_t number) {
      offer(piece, scores_[number], number - 1);
      has_character |= piece == size && number != 0;
    });
    if (has_character) continue;
    if (!unknown_) throw std::invalid_argument("a character is no piece");
    offer(size, unknown_score_, *unknown_);
  }
  const auto is_unknown = [&](const Piece& piece) { return unknown_ && piece.id == *unknown_; };
  auto end = static_cast<uint32_t>(word.size());
  for (Piece last = best[end]; end > 0;) {
    uint32_t begin = last.other;
    while (is_unknown(last) && begin > 0 && is_unknown(best[begin]))
      begin = best[begin].other;  // adjacent unknown pieces are one
    last.other = end;
    end = begin;
    std::swap(last, best[begin]);
  }
  for (uint32_t at = 0; at < word.size(); at = best[at].other) {
    if (is_unknown(best[at]))
      append_unknown(word.substr(at, best[at].other - at), ids);
    else
      ids.push_back(best[at].id);
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
