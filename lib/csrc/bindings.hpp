// Python bindings in other files than bindings.cpp.
#pragma once

#include <pybind11/pybind11.h>

void bind_decoding(pybind11::module_& module);
void bind_masking(pybind11::module_& module);
void bind_texts(pybind11::module_& module);
