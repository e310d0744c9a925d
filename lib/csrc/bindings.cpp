// Python bindings: the only file here that knows pybind11. NumPy arrays come in by reference and
// new ones go out; the work between runs without Python's global lock.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

#include "blend.hpp"
#include "index.hpp"

namespace py = pybind11;

namespace {

using Int32Array = py::array_t<int32_t, py::array::c_style>;
using Float64Array = py::array_t<double, py::array::c_style>;

tokamake::Int32View view(const Int32Array& array) {
  if (array.ndim() != 1) throw std::invalid_argument("arrays have one dimension");
  return {static_cast<const py::array&>(array).data(), array.size()};
}

template <typename T>
py::array sample_index(const tokamake::Int32View& lengths,
                       const tokamake::Int32View& document_index, int64_t sequence_length,
                       int64_t num_samples) {
  py::array_t<T> rows({num_samples + 1, int64_t{2}});
  T* data = rows.mutable_data();
  {
    py::gil_scoped_release release;
    tokamake::fill_sample_index(lengths, document_index, sequence_length, num_samples, data);
  }
  return rows;
}

py::array build_sample_index(const Int32Array& lengths, const Int32Array& document_index,
                             int64_t sequence_length, int64_t num_epochs, int64_t tokens_per_epoch,
                             bool wide) {
  const auto samples = tokamake::count_samples(sequence_length, num_epochs, tokens_per_epoch);
  // Offsets always fit: a length is an int32. Megatron decides by the positions alone, too.
  wide = wide || document_index.size() > std::numeric_limits<int32_t>::max();
  const auto build = wide ? sample_index<int64_t> : sample_index<int32_t>;
  return build(view(lengths), view(document_index), sequence_length, samples);
}

py::tuple build_blend_index(const Float64Array& weights, int64_t size) {
  if (weights.ndim() != 1) throw std::invalid_argument("arrays have one dimension");
  if (size < 0) throw std::invalid_argument("size is not negative");
  const auto* data = static_cast<const char*>(static_cast<const py::array&>(weights).data());
  std::vector<double> shares(static_cast<size_t>(weights.size()));
  std::copy_n(data, shares.size() * sizeof(double), reinterpret_cast<char*>(shares.data()));
  py::array_t<int16_t> dataset_index(size);
  py::array_t<int64_t> dataset_sample_index(size);
  auto* datasets = dataset_index.mutable_data();
  auto* samples = dataset_sample_index.mutable_data();
  {
    py::gil_scoped_release release;
    tokamake::fill_blend_index(shares, size, datasets, samples);
  }
  return py::make_tuple(dataset_index, dataset_sample_index);
}

}  // namespace

PYBIND11_MODULE(_csrc, module) {
  module.doc() = "Index and blend builders.";
  module.def("build_sample_index", &build_sample_index, py::arg("lengths").noconvert(),
             py::arg("document_index").noconvert(), py::arg("sequence_length"),
             py::arg("num_epochs"), py::arg("tokens_per_epoch"), py::kw_only(),
             py::arg("wide") = false,
             "Rows (position in document_index, offset) of each sample's first token.");
  module.def("build_blend_index", &build_blend_index, py::arg("weights").noconvert(),
             py::arg("size"), "Dataset of each sample of a blend, and the sample's number in it.");
}
