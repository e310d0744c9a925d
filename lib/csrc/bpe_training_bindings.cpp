// Python bindings for the training of byte-level BPE.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "bpe_training.hpp"

namespace py = pybind11;

namespace {

using UInt16Array = py::array_t<uint16_t, py::array::c_style>;

constexpr size_t kSteps = 64;  // merges between looks for signals

std::unique_ptr<tokamake::WordCounts> make(const UInt8Array& classes,
                                           const UInt16Array& transitions) {
  check_one_dimension(classes);
  if (transitions.ndim() != 2 || transitions.shape(1) < 2)
    throw std::invalid_argument("transitions must have two dimensions");
  std::vector<tokamake::Splitter> splitters;
  splitters.emplace_back(
      std::vector<uint8_t>(classes.data(), classes.data() + classes.size()),
      std::vector<uint16_t>(transitions.data(), transitions.data() + transitions.size()),
      static_cast<size_t>(transitions.shape(1)) - 1, true, true);
  return std::make_unique<tokamake::WordCounts>(tokamake::PreTokenizer(std::move(splitters)));
}

void add(tokamake::WordCounts& words, const py::list& texts) {
  const std::vector<std::string_view> views = views_of(texts);
  py::gil_scoped_release release;
  for (const std::string_view view : views) words.add(view);
}

py::list counts(const tokamake::WordCounts& words) {
  py::list pairs;
  for (const auto& entry : words.entries())
    pairs.append(
        py::make_tuple(py::bytes(words.texts().data() + entry.begin, entry.size), entry.count));
  return pairs;
}

UInt32Array merges(tokamake::WordCounts& words, const UInt32Array& bytes,
                   const std::vector<std::pair<py::bytes, uint32_t>>& known, uint32_t num_tokens,
                   size_t vocab_size) {
  std::array<uint32_t, 256> ids;
  if (bytes.ndim() != 1 || bytes.size() != static_cast<py::ssize_t>(ids.size()))
    throw std::invalid_argument("bytes must have 256 tokens");
  std::copy(bytes.data(), bytes.data() + ids.size(), ids.begin());
  std::vector<std::pair<std::string, uint32_t>> texts;
  for (const auto& [text, id] : known) texts.emplace_back(std::string(text), id);
  std::unique_ptr<tokamake::BpeTraining> training;
  for (bool goes_on = true; goes_on;) {
    {
      py::gil_scoped_release release;
      if (!training)
        training =
            std::make_unique<tokamake::BpeTraining>(std::move(words), ids, texts, num_tokens);
      for (size_t i = 0; i < kSteps && goes_on; ++i)
        goes_on = training->num_tokens() < vocab_size && training->step();
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  const auto& found = training->merges();
  UInt32Array rows({found.size(), size_t{3}});
  uint32_t* row = rows.mutable_data();
  for (const auto& [left, right, result] : found)
    for (const uint32_t id : {left, right, result}) *row++ = id;
  return rows;
}

}  // namespace

void bind_bpe_training(py::module_& module) {
  py::class_<tokamake::WordCounts>(module, "WordCounts", "Numbers of the words of texts.")
      .def(py::init(&make), py::arg("classes"), py::arg("transitions"))
      .def("add", &add, py::arg("texts"))
      .def("counts", &counts)
      .def("merges", &merges, py::arg("bytes"), py::kw_only(), py::arg("known"),
           py::arg("num_tokens"), py::arg("vocab_size"));
}
