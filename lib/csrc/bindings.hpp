// Shared by the Python bindings: bindings.cpp, and files that bind a part of the module.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <vector>

using Int32Array = pybind11::array_t<int32_t, pybind11::array::c_style>;
using Int64Array = pybind11::array_t<int64_t, pybind11::array::c_style>;
using UInt8Array = pybind11::array_t<uint8_t, pybind11::array::c_style>;
using UInt32Array = pybind11::array_t<uint32_t, pybind11::array::c_style>;
using Float64Array = pybind11::array_t<double, pybind11::array::c_style>;

template <typename... Arrays>
void check_one_dimension(const Arrays&... arrays) {
  if (((arrays.ndim() != 1) || ...)) throw std::invalid_argument("arrays must have one dimension");
}

// Text in UTF-8, which the string owns.
inline std::string_view view_of(const pybind11::str& text) {
  Py_ssize_t size = 0;
  const char* begin = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (begin == nullptr) throw pybind11::error_already_set();
  return {begin, static_cast<size_t>(size)};
}

// Texts in UTF-8, which the strings of the list own.
std::vector<std::string_view> views_of(const pybind11::list& texts);

void bind_bpe_training(pybind11::module_& module);
void bind_decoding(pybind11::module_& module);
void bind_language(pybind11::module_& module);
void bind_masking(pybind11::module_& module);
void bind_minhash(pybind11::module_& module);
void bind_ngrams(pybind11::module_& module);
void bind_texts(pybind11::module_& module);
void bind_text_statistics(pybind11::module_& module);
void bind_wikitext(pybind11::module_& module);
