#include "c4_lines.hpp"

#include <algorithm>

#include "word_splitting.hpp"

namespace tokamake {

namespace {

struct SpacedWords {
  int64_t count = 0;
  int64_t longest = 0;  // characters
};

// Words of Python's str.split.
SpacedWords spaced_words(std::string_view line, const uint8_t* flags) {
  SpacedWords words;
  int64_t length = 0;
  for (const char* at = line.data(); at < line.data() + line.size();) {
    length = flags[next_code_point(at)] & flag::kSpace ? 0 : length + 1;
    words.count += length == 1;
    words.longest = std::max(words.longest, length);
  }
  return words;
}

// End of the citation whose "[" is at `at`, or `at`.
size_t after_citation(std::string_view line, size_t at) {
  for (const std::string_view known : {"[edit]", "[citation needed]"}) {
    if (line.substr(at, known.size()) == known) return at + known.size();
  }
  size_t end = at + 1;
  while (end < line.size() && is_digit(line[end])) ++end;
  return end < line.size() && line[end] == ']' ? end + 1 : at;
}

void remove_citations(std::string_view line, std::string& kept) {
  kept.clear();
  for (size_t at = 0; at < line.size();) {
    const size_t after = line[at] == '[' ? after_citation(line, at) : at;
    if (after == at)
      kept += line[at++];
    else
      at = after;
  }
}

bool has_end_mark(std::string_view line) {
  constexpr std::string_view kMarks = ".?!\"'";
  return !line.empty() && kMarks.find(line.back()) != kMarks.npos && !ends_with(line, "...");
}

bool has(std::string_view line, std::string_view phrase) { return line.find(phrase) != line.npos; }

}  // namespace

int64_t count_sentences(std::string_view line, const uint8_t* flags) {
  int64_t sentences = 1;
  bool ended = false;
  split_words(line, flags, [&](std::string_view word) {
    uint8_t all = 0xFF;
    int64_t length = 0;
    for (const char* at = word.data(); at < word.data() + word.size() && all; ++length) {
      all &= flags[next_code_point(at)] & (flag::kPunctuation | flag::kSentenceEnd);
    }
    if (length == 1 && all & flag::kSentenceEnd) {
      ended = true;
    } else if (ended && !all) {
      ++sentences;
      ended = false;
    }
  });
  return sentences;
}

C4Lines c4_lines(std::string_view text, const uint8_t* flags, const C4Rules& rules) {
  C4Lines found;
  std::string without, lower;
  split_lines(text, flags, [&](std::string_view line) {
    if (!found.refused.empty()) return;
    line = strip(line, flags);
    const auto words = spaced_words(line, flags);
    if (rules.max_word_characters >= 0 && words.longest > rules.max_word_characters) {
      ++found.long_words;
      return;
    }
    if (rules.citations && has(line, "[")) {
      remove_citations(line, without);
      line = without;
    }
    if (rules.end_marks && !has_end_mark(line)) {
      ++found.no_end_mark;
      return;
    }
    if (words.count < rules.min_words) {
      ++found.few_words;
      return;
    }
    lower.resize(line.size());
    std::transform(line.begin(), line.end(), lower.begin(), to_lower);
    const auto is_in_line = [&](const std::string& phrase) { return has(lower, phrase); };
    if (rules.lorem_ipsum && has(lower, "lorem ipsum")) {
      found.refused = "lorem ipsum";
    } else if (rules.javascript && has(lower, "javascript")) {
      ++found.javascript;
    } else if (rules.curly_bracket && has(line, "{")) {
      found.refused = "{";
    } else if (std::any_of(rules.policy.begin(), rules.policy.end(), is_in_line)) {
      ++found.policy;
    } else {
      found.sentences += count_sentences(line, flags);
      if (!found.text.empty()) found.text += '\n';
      found.text += line;
    }
  });
  found.text = std::string(strip(found.text, flags));
  return found;
}

}  // namespace tokamake
