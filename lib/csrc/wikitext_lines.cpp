#include <algorithm>
#include <utility>
#include <vector>

#include "text.hpp"
#include "wikitext.hpp"
#include "word_splitting.hpp"

namespace tokamake {

namespace {

constexpr auto kNone = std::string_view::npos;
constexpr std::string_view kItemMarks = "*#:;";

// `line` with each run of spaces and tabs as one space; `storage` owns it if it differs.
std::string_view with_single_spaces(std::string_view line, std::string& storage) {
  const auto is_blank = [](char c) { return c == ' ' || c == '\t'; };
  storage.clear();
  for (size_t at = 0; at < line.size();) {
    size_t end = at + 1;
    while (is_blank(line[at]) && end < line.size() && is_blank(line[end])) ++end;
    storage += end - at > 1 ? ' ' : line[at];
    at = end;
  }
  return storage;
}

struct Heading {
  size_t level = 0;
  std::string title;  // empty: the line is no heading
};

Heading heading_of(std::string_view line) {
  const size_t before = std::min(line.find_first_not_of('='), line.size());
  const size_t after =
      before == line.size() ? before : line.size() - 1 - line.find_last_not_of('=');
  const size_t level = std::min({before, after, size_t{6}});
  const size_t end = std::max(level, line.size() - level);
  return {level, level ? std::string(strip(line.substr(level, end - level))) : ""};
}

// An item of a list without its marks; empty if templates have left no more than punctuation.
std::string item_of(std::string_view line, const std::function<bool(std::string_view)>& has_word) {
  auto item = line.substr(std::min(line.find_first_not_of(kItemMarks), line.size()));
  item.remove_prefix(std::min(item.find_first_not_of(" ,;"), item.size()));
  const bool stays = std::any_of(item.begin(), item.end(), is_alphanumeric) ||
                     item.find('\x01') != kNone || has_word(item);
  if (!stays) return {};
  return ((line[0] == '*' || line[0] == '#') ? "- " : "") + std::string(item);
}

// Whether a template can have a parameter of this name.
bool is_parameter(std::string_view name) {
  return !name.empty() && name.size() <= 40 && std::count(name.begin(), name.end(), ' ') < 3 &&
         std::all_of(
             name.begin(), name.end(),
             [](char c) {
               return is_alphanumeric(c) || std::string_view(" _-./").find(c) != kNone ||
                      (c & 0x80);
             });
}

// A line that begins with "|", without its first parameters `| name = value`.
std::string_view without_parameters(std::string_view line) {
  while (line.substr(0, 1) == "|") {
    const size_t equals = line.find_first_of("|=", 1);
    if (equals == kNone || line[equals] == '|' || !is_parameter(strip(line.substr(1, equals - 1))))
      break;
    line.remove_prefix(std::min(line.find('|', equals), line.size()));
  }
  return line;
}

// The text of a line that begins with "|" outside a table. `is_in_rows` tells whether the mark of
// a row stands above: a template has begun the table, whose cells go.
std::string_view text_of_cell(std::string_view line, bool& is_in_rows) {
  const auto mark = line.substr(0, 2);
  if (mark == "|}") {
    is_in_rows = false;
    return strip(line.substr(2));
  }
  if (mark == "|-") {
    line = strip(line.substr(std::min(line.find_first_not_of('-', 1), line.size())));
    is_in_rows = is_in_rows || line.empty() || line.find('=') != kNone;
    return is_in_rows ? std::string_view() : line;
  }
  if (is_in_rows) return {};
  line = without_parameters(line);
  return strip(
      line.substr(std::min(line.find_first_not_of(mark == "|+" ? "|+" : "|"), line.size())));
}

}  // namespace

std::string clean_lines(std::string_view text,
                        const std::function<bool(std::string_view)>& has_word) {
  std::string out, spaced, item;
  std::vector<Heading> headings;  // without text so far
  bool is_after_blank = false, is_in_rows = false;
  for (size_t start = 0, end = 0; start <= text.size(); start = end + 1) {
    end = std::min(text.find('\n', start), text.size());
    auto line = strip(text.substr(start, end - start));
    if (line.find("  ") != kNone || line.find('\t') != kNone)
      line = with_single_spaces(line, spaced);
    if (line.substr(0, 1) == "=") {
      Heading heading = heading_of(line);
      if (!heading.title.empty()) {
        is_in_rows = false;
        while (!headings.empty() && headings.back().level >= heading.level) headings.pop_back();
        headings.push_back(std::move(heading));
        continue;
      }
    } else if (line.substr(0, 4) == "----") {
      line = strip(line.substr(std::min(line.find_first_not_of('-'), line.size())));
    } else if (line.substr(0, 1) == "|") {
      line = text_of_cell(line, is_in_rows);
    } else if (!line.empty() && kItemMarks.find(line[0]) != kNone) {
      line = item = item_of(line, has_word);
    }
    if (line.empty()) {
      is_after_blank = true;
      continue;
    }
    for (const auto& heading : headings) out.append("\n\n").append(heading.title);
    out.append(is_after_blank || !headings.empty() ? "\n\n" : "\n").append(line);
    headings.clear();
    is_after_blank = false;
  }
  return out.substr(std::min(out.find_first_not_of('\n'), out.size()));
}

}  // namespace tokamake
