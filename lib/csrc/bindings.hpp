// Python bindings that bindings.cpp does not hold itself.
#pragma once

#include <pybind11/pybind11.h>

void bind_texts(pybind11::module_& module);
