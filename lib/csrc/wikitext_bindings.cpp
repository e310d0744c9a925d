// Python bindings for the markup of wikitext.
#include <pybind11/functional.h>

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "bindings.hpp"
#include "wikitext.hpp"

namespace py = pybind11;

namespace {

using tokamake::Element;
using Names = std::set<std::string>;

// A class of its own: pybind11 converts a bare map to a dict.
struct WikitextElements {
  tokamake::Elements elements;
};

WikitextElements elements_of(const Names& dropped, const Names& literal, const Names& breaking,
                             const Names& inlined) {
  WikitextElements known;
  for (const auto& [names, element] :
       {std::pair(&dropped, Element::kDropped), std::pair(&literal, Element::kLiteral),
        std::pair(&breaking, Element::kBreaking), std::pair(&inlined, Element::kInline)}) {
    for (const auto& name : *names) known.elements[name] = element;
  }
  return known;
}

using Literal = std::function<std::string(std::string_view, std::string_view)>;
using Test = std::function<bool(std::string_view)>;
using Shown = std::function<std::string(std::string_view)>;

std::string without_templates(const py::str& text, const Test& is_shown, const Shown& shown) {
  return tokamake::without_templates(view_of(text), is_shown, shown);
}

std::string without_tables(const py::str& text) { return tokamake::without_tables(view_of(text)); }

std::string clean_lines(const py::str& text, const Test& has_word) {
  return tokamake::clean_lines(view_of(text), has_word);
}

std::string without_links(const py::str& text, const Test& is_dropped) {
  return tokamake::without_links(view_of(text), is_dropped);
}

}  // namespace

void bind_wikitext(py::module_& module) {
  py::class_<WikitextElements>(module, "WikitextElements", "Names of elements of wikitext.")
      .def(py::init(&elements_of), py::kw_only(), py::arg("dropped"), py::arg("literal"),
           py::arg("breaking"), py::arg("inlined"))
      .def(
          "remove",
          [](const WikitextElements& known, const py::str& text, const Literal& literal) {
            return tokamake::without_elements(view_of(text), known.elements, literal);
          },
          py::arg("text"), py::arg("literal"), "Remove comments, tags and dropped elements.");
  module.def("without_templates", &without_templates, py::arg("text"), py::arg("is_shown"),
             py::arg("shown"), "Remove templates and parameters.");
  module.def("without_tables", &without_tables, py::arg("text"), "Remove tables.");
  module.def("without_links", &without_links, py::arg("text"), py::arg("is_dropped"),
             "Replace links by their labels.");
  module.def("clean_lines", &clean_lines, py::arg("text"), py::arg("has_word"), "Clean lines.");
}
