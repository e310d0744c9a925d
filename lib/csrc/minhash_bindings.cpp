// Python bindings for near-duplicates: band keys of texts, and clusters of documents.
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "minhash.hpp"

namespace py = pybind11;

namespace {

using UInt64Array = py::array_t<uint64_t, py::array::c_style>;

std::unique_ptr<tokamake::MinHash> make(const UInt32Array& characters, bool of_characters,
                                        size_t shingle, size_t bands, size_t rows, uint64_t seed) {
  check_one_dimension(characters);
  std::vector<uint32_t> table(characters.data(), characters.data() + characters.size());
  return std::make_unique<tokamake::MinHash>(std::move(table), of_characters, shingle, bands, rows,
                                             seed);
}

UInt64Array sign(tokamake::MinHash& minhash, const py::list& texts) {
  const std::vector<std::string_view> views = views_of(texts);
  UInt64Array keys({views.size(), minhash.bands()});
  uint64_t* row = keys.mutable_data();
  {
    py::gil_scoped_release release;
    for (const std::string_view text : views) {
      minhash.sign(text, row);
      row += minhash.bands();
    }
  }
  return keys;
}

void join_clusters(UInt32Array& parents, const UInt32Array& first, const UInt32Array& second) {
  check_one_dimension(parents, first, second);
  if (first.size() != second.size()) throw std::invalid_argument("pairs must have two documents");
  uint32_t* const roots = parents.mutable_data();
  py::gil_scoped_release release;
  tokamake::join_clusters(roots, static_cast<size_t>(parents.size()), first.data(), second.data(),
                          static_cast<size_t>(first.size()));
}

void resolve_clusters(UInt32Array& parents) {
  check_one_dimension(parents);
  uint32_t* const roots = parents.mutable_data();
  py::gil_scoped_release release;
  tokamake::resolve_clusters(roots, static_cast<size_t>(parents.size()));
}

}  // namespace

void bind_minhash(py::module_& module) {
  py::class_<tokamake::MinHash>(module, "MinHash", "Band keys of texts.")
      .def(py::init(&make), py::arg("characters").noconvert(), py::kw_only(),
           py::arg("of_characters"), py::arg("shingle"), py::arg("bands"), py::arg("rows"),
           py::arg("seed"))
      .def("sign", &sign, py::arg("texts"));
  module.def("join_clusters", &join_clusters, py::arg("parents").noconvert(),
             py::arg("first").noconvert(), py::arg("second").noconvert());
  module.def("resolve_clusters", &resolve_clusters, py::arg("parents").noconvert());
}
