// Python bindings for the reader of JSON lines and the byte-level tokenizer.
#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "byte_level.hpp"
#include "json_lines.hpp"

namespace py = pybind11;

namespace {

// Shrinks an array to its first elements, and releases the memory after them.
template <typename Array>
Array& cut(Array& array, size_t size) {
  array.resize({static_cast<py::ssize_t>(size)}, false);
  return array;
}

Int64Array array_of(const std::vector<int64_t>& numbers) {
  return Int64Array(static_cast<py::ssize_t>(numbers.size()), numbers.data());
}

py::object json_texts(const py::buffer& lines, const std::string& key) {
  const py::buffer_info info = lines.request();
  if (info.itemsize != 1 || info.ndim != 1 || (info.size > 1 && info.strides[0] != 1))
    throw std::invalid_argument("lines must be bytes");
  const std::string_view text(static_cast<const char*>(info.ptr), static_cast<size_t>(info.size));
  UInt8Array utf8(info.size + static_cast<py::ssize_t>(tokamake::kJsonSlack));
  auto* const out = reinterpret_cast<char*>(utf8.mutable_data());
  std::vector<int64_t> ends, line_ends;
  bool plain = false;
  {
    py::gil_scoped_release release;
    plain = tokamake::read_texts(text, key, out, ends, line_ends);
  }
  if (!plain) return py::none();
  const auto size = ends.empty() ? 0 : static_cast<size_t>(ends.back());
  return py::make_tuple(cut(utf8, size), array_of(ends), array_of(line_ends));
}

tokamake::Merges merges_of(const UInt32Array& bytes, const UInt32Array& merges) {
  if (bytes.ndim() != 1 || bytes.size() != 256)
    throw std::invalid_argument("bytes must have a token for each of 256 bytes");
  if (merges.ndim() != 2 || merges.shape(1) != 3)
    throw std::invalid_argument("merges must have three columns");
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

py::tuple encode_views(tokamake::ByteLevel& tokenizer, const std::vector<std::string_view>& views) {
  const size_t bytes =
      std::accumulate(views.begin(), views.end(), size_t{0},
                      [](size_t sum, std::string_view view) { return sum + view.size(); });
  Int64Array lengths(static_cast<py::ssize_t>(views.size()));
  UInt32Array ids(static_cast<py::ssize_t>(tokenizer.room_for(bytes, views.size())));
  int64_t* to_lengths = lengths.mutable_data();
  uint32_t* to_ids = ids.mutable_data();
  size_t tokens = 0;
  {
    py::gil_scoped_release release;
    tokens = tokenizer.encode(views, to_ids, to_lengths);
  }
  return py::make_tuple(cut(ids, tokens), lengths);
}

py::tuple encode(tokamake::ByteLevel& tokenizer, const py::list& texts) {
  return encode_views(tokenizer, views_of(texts));
}

py::tuple encode_utf8(tokamake::ByteLevel& tokenizer, const UInt8Array& utf8,
                      const Int64Array& ends) {
  const auto* const text = reinterpret_cast<const char*>(utf8.data());
  std::vector<std::string_view> views;
  views.reserve(static_cast<size_t>(ends.size()));
  int64_t begin = 0;
  for (py::ssize_t i = 0; i < ends.size(); ++i) {
    const int64_t end = ends.data()[i];
    if (end < begin || end > utf8.size()) throw std::invalid_argument("an end is out of range");
    views.emplace_back(text + begin, static_cast<size_t>(end - begin));
    begin = end;
  }
  return encode_views(tokenizer, views);
}

}  // namespace

void bind_texts(py::module_& module) {
  module.def("json_texts", &json_texts, py::arg("lines"), py::arg("key"));
  py::class_<tokamake::ByteLevel>(module, "ByteLevel",
                                  "Byte-level BPE with GPT-2's pre-tokenization.")
      .def(py::init(&make), py::arg("classes").noconvert(), py::arg("bytes").noconvert(),
           py::arg("merges").noconvert(), py::kw_only(), py::arg("added"),
           py::arg("add_prefix_space"))
      .def("encode", &encode, py::arg("texts"))
      .def("encode_utf8", &encode_utf8, py::arg("utf8").noconvert(), py::arg("ends").noconvert());
}
