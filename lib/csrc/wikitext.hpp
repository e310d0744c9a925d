// Markup of wikitext that nests (elements such as <ref>, templates, tables, links), and its lines.
//
// Texts are valid UTF-8. Each function takes linear time, whatever is unbalanced in the text.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace tokamake {

// Stands for a template or reference that went.
constexpr char kGap = '\x04';
// Stands for the braces of a template that never ends.
constexpr char kUnclosed = '\x03';

enum class Element : uint8_t {
  kDropped,   // goes with its content
  kLiteral,   // has content that is no wikitext
  kBreaking,  // its tags end a line
  kInline,    // its tags go, and its content stays
};
using Elements = std::unordered_map<std::string, Element>;

// Removes comments, tags and dropped elements. `literal` replaces the literal elements: it takes
// name and content.
std::string without_elements(
    std::string_view text, const Elements& elements,
    const std::function<std::string(std::string_view, std::string_view)>& literal);

// Removes {{templates}} and {{{parameters}}}; braces are matched as MediaWiki does. `is_shown`
// takes the begin of a template, up to its first "|". It tells whether `shown` returns the text
// that stays of the template; longer ones than 2,000 characters go.
std::string without_templates(std::string_view text,
                              const std::function<bool(std::string_view)>& is_shown,
                              const std::function<std::string(std::string_view)>& shown);

// Removes tables, {| to |}; of one that has no end, only the lines to the next blank line. Removes
// {| at the end of a line, too, which begins no table.
std::string without_tables(std::string_view text);

// Replaces [[links]] by their labels. Links to namespaces for which `is_dropped` is true go, with
// what they enclose.
std::string without_links(std::string_view text,
                          const std::function<bool(std::string_view)>& is_dropped);

// Cleans lines; drops blank ones at the ends, and headings without text below them. Of lines that
// begin with | outside a table, parameters of templates and cells below |- go. `has_word`
// tells whether an item of a list has a letter or digit; it is asked about items without ASCII
// ones.
std::string clean_lines(std::string_view text,
                        const std::function<bool(std::string_view)>& has_word);

}  // namespace tokamake
