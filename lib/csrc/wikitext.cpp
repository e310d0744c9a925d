#include "wikitext.hpp"

#include <algorithm>
#include <deque>
#include <unordered_set>
#include <utility>
#include <vector>

#include "text.hpp"
#include "word_splitting.hpp"

namespace tokamake {

namespace {

constexpr auto kNone = std::string_view::npos;
constexpr std::string_view kGapText(&kGap, 1), kUnclosedText(&kUnclosed, 1);
constexpr int64_t kNameCharacters = 40;
constexpr int64_t kLongestShown = 2000;  // characters; it bounds what nesting copies

// Parts of a text, and what replaces others. Open markup is the index of its first piece.
using Pieces = std::vector<std::string_view>;

std::string join(const Pieces& pieces, size_t first = 0) {
  std::string text;
  for (size_t i = first; i < pieces.size(); ++i) text += pieces[i];
  return text;
}

std::string_view slice(std::string_view text, size_t start, size_t end) {
  return text.substr(start, end - start);
}

// The text from `mark` on; empty if it has none.
std::string_view from(std::string_view text, std::string_view mark) {
  return text.substr(std::min(text.find(mark), text.size()));
}

bool is_any(char c, std::string_view characters) { return characters.find(c) != kNone; }

// Position behind the first `characters` characters, or the end.
size_t after_characters(std::string_view text, int64_t characters) {
  const char* at = text.data();
  while (characters-- > 0 && at < text.data() + text.size()) next_code_point(at);
  return static_cast<size_t>(at - text.data());
}

// Calls `visit` with start and end of each run that begins with the pair `open` or `close`.
template <typename Visit>
void visit_runs(std::string_view text, std::string_view open, std::string_view close, Visit visit) {
  size_t next_open = text.find(open), next_close = text.find(close);
  while (next_open != next_close) {  // equal: there is none
    const bool is_open = next_open < next_close;
    size_t& next = is_open ? next_open : next_close;
    const size_t start = next;
    const size_t end = std::min(text.find_first_not_of(text[start], start), text.size());
    visit(start, end);
    next = text.find(is_open ? open : close, end);
  }
}

// ---- Elements ----

struct Tag {
  std::string name;  // in lower case
  bool is_end = false;
  bool is_empty = false;  // <name />
  size_t end = 0;         // position behind it; 0: there is no tag
};

// The tag whose "<" is at `start`.
Tag tag_at(std::string_view text, size_t start) {
  Tag tag;
  size_t at = start + 1;
  tag.is_end = at < text.size() && text[at] == '/';
  at += tag.is_end;
  for (; at < text.size() && is_alphanumeric(text[at]); ++at) tag.name += to_lower(text[at]);
  if (tag.name.empty() || is_digit(tag.name[0]) || (at < text.size() && text[at] == '-'))
    return tag;
  const size_t end = text.find_first_of("<>", at);
  if (end == kNone || text[end] == '<') return tag;
  const auto attributes = strip(slice(text, at, end));
  tag.is_empty = !attributes.empty() && attributes.back() == '/';
  tag.end = end + 1;
  return tag;
}

// A comment that is alone in its line takes the line with it.
size_t end_of_comment(std::string_view text, size_t start) {
  const size_t end = text.find("-->", start + 4);
  if (end == kNone) return text.size();
  const bool is_alone = (start == 0 || text[start - 1] == '\n') && text.substr(end + 3, 1) == "\n";
  return end + 3 + is_alone;
}

// Where the end tag of an element starts and ends; its end is 0 if there is none. Only tables
// enclose each other.
std::pair<size_t, size_t> end_of_element(std::string_view text, const std::string& name,
                                         size_t start) {
  int64_t depth = 1;
  while ((start = text.find('<', start)) != kNone) {
    const Tag tag = tag_at(text, start);
    if (tag.end && tag.name == name) {
      depth += tag.is_end ? -1 : name == "table";
      if (depth == 0) return {start, tag.end};
    }
    ++start;
  }
  return {0, 0};
}

// ---- Templates ----

class TemplateTexts {
 public:
  TemplateTexts(const std::function<bool(std::string_view)>& is_shown,
                const std::function<std::string(std::string_view)>& shown)
      : is_shown_(is_shown), shown_(shown) {}

  // What stays of the template that the pieces from `first` on form.
  std::string operator()(const Pieces& pieces, size_t first) const {
    const auto begin = pieces[first].substr(0, after_characters(pieces[first], kNameCharacters));
    if (!is_shown_(begin.substr(0, begin.find('|')))) return std::string(kGapText);
    int64_t characters = 0;
    for (size_t i = first; i < pieces.size(); ++i) characters += length_of(pieces[i]);
    return characters > kLongestShown ? std::string(kGapText) : shown_(join(pieces, first));
  }

 private:
  const std::function<bool(std::string_view)>& is_shown_;
  const std::function<std::string(std::string_view)>& shown_;
};

// Replaces {{templates}} without braces inside.
std::string without_innermost(std::string_view text, const TemplateTexts& text_of) {
  std::string out;
  size_t position = 0;
  for (size_t at = 0; (at = text.find("{{", at)) != kNone;) {
    const size_t start = at;
    at = std::min(text.find_first_not_of('{', at), text.size());
    const size_t end = text.find_first_of("{}", at);
    if (at != start + 2 || end == at || end == kNone || text.substr(end, 2) != "}}" ||
        text.substr(end + 2, 1) == "}")
      continue;
    out += slice(text, position, start);
    out += text_of({slice(text, at, end)}, 0);
    position = at = end + 2;
  }
  return out += text.substr(position);
}

// ---- Links ----

// Replaces links without a colon that enclose no other link.
std::string without_usual_links(std::string_view text) {
  std::string out;
  size_t position = 0;
  for (size_t start = 0; (start = text.find("[[", start)) != kNone;) {
    size_t label = start + 2, end = text.find_first_of("[]|\n:", label);
    if (end != kNone && end != label && text[end] == '|') {
      label = end + 1;
      end = text.find_first_of("[]\n", label);
    }
    if (end == kNone || end == label || text.substr(end, 2) != "]]") {
      ++start;
      continue;
    }
    out += slice(text, position, start);
    out += slice(text, label, end);
    position = start = end + 2;
  }
  return out += text.substr(position);
}

// Whether `is_dropped` is true for the namespace of the link to `target`.
bool goes(std::string_view target, const std::function<bool(std::string_view)>& is_dropped) {
  const size_t colon = target.find(':');
  return colon != kNone && is_dropped(target.substr(0, colon));
}

// Replaces the pieces from `first` on by the label of the link that they form.
void close_link(Pieces& out, size_t first,
                const std::function<bool(std::string_view)>& is_dropped) {
  if (first == out.size()) return;
  const size_t pipe = out[first].find('|');
  std::string_view target = out[first].substr(0, pipe);
  const bool is_alone = out.size() == first + 1;
  if (goes(target, is_dropped)) {
    out.resize(first);
  } else if (target.find_first_of("[\n") != kNone || (pipe == kNone && !is_alone)) {
    return;  // no link: a link before its pipe, or brackets of another kind
  } else if (pipe == kNone) {
    target = strip(target);
    out[first] = target.substr(!target.empty() && target[0] == ':');
  } else if (pipe + 1 < out[first].size() || !is_alone) {
    out[first] = out[first].substr(pipe + 1);
  } else {  // [[Help:Page (topic)|]] shows Page
    target = target.substr(target.rfind(':') + 1);
    out[first] = target.substr(0, target.find(" ("));
  }
}

}  // namespace

std::string without_elements(
    std::string_view text, const Elements& elements,
    const std::function<std::string(std::string_view, std::string_view)>& literal) {
  std::string out;
  std::unordered_set<std::string> unclosed;  // no further end tag: do not search for it again
  size_t position = 0;
  for (size_t start = 0; (start = text.find('<', start)) != kNone;) {
    const size_t begin = start++;
    if (text.substr(begin, 4) == "<!--") {
      out += slice(text, position, begin);
      position = start = end_of_comment(text, begin);
      continue;
    }
    const Tag tag = tag_at(text, begin);
    const auto known = tag.end ? elements.find(tag.name) : elements.end();
    if (known == elements.end()) continue;  // it is text, such as a < b > c
    const Element element = known->second;
    out += slice(text, position, begin);
    position = tag.end;
    const bool has_content = element == Element::kDropped || element == Element::kLiteral;
    if (has_content && !tag.is_end && !tag.is_empty && !unclosed.count(tag.name)) {
      const auto end = end_of_element(text, tag.name, tag.end);
      if (!end.second) {
        unclosed.insert(tag.name);
      } else {
        if (element == Element::kLiteral) out += literal(tag.name, slice(text, tag.end, end.first));
        position = end.second;
      }
    }
    if (element == Element::kBreaking) out += '\n';
    if (element == Element::kDropped) out += kGap;
    start = position;
  }
  return out += text.substr(position);
}

std::string without_templates(std::string_view text,
                              const std::function<bool(std::string_view)>& is_shown,
                              const std::function<std::string(std::string_view)>& shown) {
  const TemplateTexts text_of(is_shown, shown);
  const std::string outer = without_innermost(text, text_of);
  text = outer;
  Pieces out;
  std::deque<std::string> texts;                  // of templates, which `out` refers to
  std::vector<std::pair<size_t, size_t>> opened;  // number of braces, index of their mark in `out`
  size_t position = 0;
  visit_runs(text, "{{", "}}", [&](size_t start, size_t end) {
    out.push_back(slice(text, position, start));
    position = end;
    size_t count = end - start;
    if (text[start] == '{') {
      opened.emplace_back(count, out.size());
      out.push_back(kUnclosedText);
      return;
    }
    while (count >= 2 && !opened.empty()) {
      auto [braces, first] = opened.back();
      opened.pop_back();
      const size_t used = std::min({count, braces, size_t{3}});
      if (used == 2) texts.push_back(text_of(out, first + 1));
      out.resize(first);
      count -= used;
      braces -= used;
      if (braces >= 2) {
        opened.emplace_back(braces, first);
        out.push_back(kUnclosedText);
      } else if (braces == 1) {
        out.push_back("{");
      }
      out.push_back(used == 2 ? std::string_view(texts.back()) : kGapText);
    }
    if (count == 1) out.push_back("}");
  });
  out.push_back(text.substr(position));
  return join(out);
}

std::string without_tables(std::string_view text) {
  Pieces out;
  std::vector<size_t> opened;  // index in `out` of the first piece of each open table
  size_t position = 0;
  for (size_t line = 0; line < text.size();) {
    size_t at = line;
    while (at < text.size() && is_any(text[at], " \t:*#;\x04")) ++at;
    const auto mark = text.substr(at, 2);
    if (mark == "{|" || mark == "|}") {
      out.push_back(slice(text, position, line));
      position = at;  // `clean_lines` removes the mark of an end without a table
      if (mark == "{|" || !opened.empty()) position += 2;
      if (mark == "{|") {
        opened.push_back(out.size());
      } else if (!opened.empty()) {
        out.resize(opened.back());
        opened.pop_back();
      }
    }
    const size_t end = std::min(text.find('\n', at), text.size());
    if (opened.empty() && end >= position + 2 &&
        slice(text, end - 2, end) == "{|") {  // no table begins in a line
      out.push_back(slice(text, position, end - 2));
      position = end;
    }
    line = end + 1;
  }
  out.push_back(text.substr(position));
  for (const size_t first : opened) out[first] = from(out[first], "\n\n");
  return join(out);
}

std::string without_links(std::string_view text,
                          const std::function<bool(std::string_view)>& is_dropped) {
  const std::string unusual = without_usual_links(text);
  text = unusual;
  Pieces out;
  std::vector<size_t> opened;  // index in `out` of the first piece of each open link
  size_t position = 0;
  visit_runs(text, "[[", "]]", [&](size_t start, size_t end) {
    out.push_back(slice(text, position, start));
    position = end;
    const size_t pairs = (end - start) / 2;
    if (text[start] == '[') opened.insert(opened.end(), pairs, out.size());
    if ((end - start) % 2) out.push_back(text.substr(start, 1));
    if (text[start] == '[') return;
    for (size_t i = 0; i < pairs && !opened.empty(); ++i) {
      close_link(out, opened.back(), is_dropped);
      opened.pop_back();
    }
  });
  out.push_back(text.substr(position));
  for (const size_t first : opened) {  // never closed: only its line can be noise
    if (goes(out[first].substr(0, out[first].find('|')), is_dropped))
      out[first] = from(out[first], "\n");
  }
  return join(out);
}

}  // namespace tokamake
