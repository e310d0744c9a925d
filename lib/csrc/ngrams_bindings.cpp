// Python bindings for n-grams: of evaluation sets, and of texts that may repeat each other.
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "ngrams.hpp"

namespace py = pybind11;

namespace {

using UInt64Array = py::array_t<uint64_t, py::array::c_style>;

// Makes an object of a table of characters and two numbers.
template <typename Made>
std::unique_ptr<Made> make(const UInt32Array& characters, size_t first, size_t second) {
  check_one_dimension(characters);
  std::vector<uint32_t> table(characters.data(), characters.data() + characters.size());
  return std::make_unique<Made>(std::move(table), first, second);
}

bool add(tokamake::NgramIndex& index, const py::str& text, uint32_t set) {
  return index.add(view_of(text), set);
}

std::pair<size_t, Int64Array> find(tokamake::NgramIndex& index, const py::str& text) {
  const std::string_view view = view_of(text);
  std::vector<tokamake::NgramMatch> matches;
  size_t words = 0;
  {
    py::gil_scoped_release release;
    words = index.find(view, matches);
  }
  Int64Array rows({matches.size(), size_t{5}});
  int64_t* row = rows.mutable_data();
  for (const auto& [first_word, end_word, begin, end, set] : matches)
    for (const int64_t value : {first_word, end_word, begin, end, set}) *row++ = value;
  return {words, rows};
}

std::pair<UInt64Array, Int64Array> choose_windows(tokamake::WordWindows& chooser,
                                                  const py::str& text) {
  const std::string_view view = view_of(text);
  std::vector<tokamake::WordWindow> windows;
  {
    py::gil_scoped_release release;
    chooser.choose(view, windows);
  }
  UInt64Array hashes(windows.size());
  Int64Array spans({windows.size(), size_t{2}});
  uint64_t* hash = hashes.mutable_data();
  int64_t* span = spans.mutable_data();
  for (const auto& window : windows) {
    *hash++ = window.hash;
    *span++ = window.begin;
    *span++ = window.end;
  }
  return {hashes, spans};
}

}  // namespace

void bind_ngrams(py::module_& module) {
  using tokamake::NgramIndex;
  using tokamake::WordWindows;
  py::class_<NgramIndex>(module, "NgramIndex", "N-grams of evaluation sets.")
      .def(py::init(&make<NgramIndex>), py::arg("characters").noconvert(), py::kw_only(),
           py::arg("longest"), py::arg("shortest"))
      .def("add", &add, py::arg("text"), py::arg("set"))
      .def("finish", &NgramIndex::finish)
      .def("__len__", &NgramIndex::size)
      .def("find", &find, py::arg("text"));
  py::class_<WordWindows>(module, "WordWindows", "N-grams of texts, chosen by their hashes.")
      .def(py::init(&make<WordWindows>), py::arg("characters").noconvert(), py::kw_only(),
           py::arg("size"), py::arg("group"))
      .def("choose", &choose_windows, py::arg("text"));
}
