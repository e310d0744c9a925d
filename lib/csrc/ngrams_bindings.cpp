// Python bindings for n-grams of evaluation sets.
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "ngrams.hpp"

namespace py = pybind11;

namespace {

std::unique_ptr<tokamake::NgramIndex> make(const UInt32Array& characters, size_t longest,
                                           size_t shortest) {
  check_one_dimension(characters);
  std::vector<uint32_t> table(characters.data(), characters.data() + characters.size());
  return std::make_unique<tokamake::NgramIndex>(std::move(table), longest, shortest);
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

}  // namespace

void bind_ngrams(py::module_& module) {
  using tokamake::NgramIndex;
  py::class_<NgramIndex>(module, "NgramIndex", "N-grams of evaluation sets.")
      .def(py::init(&make), py::arg("characters").noconvert(), py::kw_only(), py::arg("longest"),
           py::arg("shortest"))
      .def("add", &add, py::arg("text"), py::arg("set"), "Add the n-grams of a text of a set.")
      .def("finish", &NgramIndex::finish, "Sort the n-grams, after the last one is added.")
      .def("__len__", &NgramIndex::size)
      .def("find", &find, py::arg("text"), "Words of a text, and its n-grams that are known.");
}
