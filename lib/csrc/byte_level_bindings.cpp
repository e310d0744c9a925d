// Python binding of the byte-level tokenizer.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "byte_level.hpp"

namespace py = pybind11;

namespace {

using UInt8Array = py::array_t<uint8_t, py::array::c_style>;
using UInt32Array = py::array_t<uint32_t, py::array::c_style>;

tokamake::Merges merges_of(const UInt32Array& bytes, const UInt32Array& merges) {
  if (bytes.ndim() != 1 || bytes.size() != 256)
    throw std::invalid_argument("bytes has a token for each of 256 bytes");
  if (merges.ndim() != 2 || merges.shape(1) != 3)
    throw std::invalid_argument("merges has three columns");
  std::array<uint32_t, 256> singles;
  std::copy_n(bytes.data(), singles.size(), singles.begin());
  std::vector<tokamake::Merges::Merge> pairs;
  const uint32_t* row = merges.data();
  for (py::ssize_t i = 0; i < merges.shape(0); ++i, row += 3)
    pairs.push_back({row[0], row[1], row[2]});
  return tokamake::Merges(singles, pairs);
}

std::unique_ptr<tokamake::ByteLevel> make(
    const UInt8Array& classes, const UInt32Array& bytes, const UInt32Array& merges,
    const std::vector<std::pair<std::string, uint32_t>>& added, bool add_prefix_space) {
  std::vector<uint8_t> table(classes.data(), classes.data() + classes.size());
  std::vector<tokamake::ByteLevel::Added> texts;
  for (const auto& [text, id] : added) texts.push_back({text, id});
  return std::make_unique<tokamake::ByteLevel>(tokamake::PreTokenizer(std::move(table)),
                                               merges_of(bytes, merges), std::move(texts),
                                               add_prefix_space);
}

py::tuple encode(tokamake::ByteLevel& tokenizer, const py::list& texts) {
  std::vector<std::string_view> views;
  views.reserve(texts.size());
  size_t bytes = 0;
  for (const py::handle text : texts) {
    Py_ssize_t size = 0;
    const char* begin = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (begin == nullptr) throw py::error_already_set();
    views.emplace_back(begin, static_cast<size_t>(size));
    bytes += static_cast<size_t>(size);
  }
  py::array_t<int64_t> lengths(static_cast<py::ssize_t>(views.size()));
  py::array_t<uint32_t> ids(static_cast<py::ssize_t>(tokenizer.room_for(bytes, views.size())));
  int64_t* to_lengths = lengths.mutable_data();
  uint32_t* to_ids = ids.mutable_data();
  size_t tokens = 0;
  {
    py::gil_scoped_release release;
    tokens = tokenizer.encode(views, to_ids, to_lengths);
  }
  return py::make_tuple(ids[py::slice(0, static_cast<py::ssize_t>(tokens), 1)], lengths);
}

}  // namespace

void bind_byte_level(py::module_& module) {
  py::class_<tokamake::ByteLevel>(module, "ByteLevel", "Byte-level BPE with GPT-2's words.")
      .def(py::init(&make), py::arg("classes").noconvert(), py::arg("bytes").noconvert(),
           py::arg("merges").noconvert(), py::kw_only(), py::arg("added"),
           py::arg("add_prefix_space"))
      .def("encode", &encode, py::arg("texts"),
           "Tokens of all texts, one after the other, and how many each has.");
}
