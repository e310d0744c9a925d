// Bindings of decode.hpp. Tensors come in as addresses of contiguous fp32 (lengths: int64): as
// arrays, they would take longer than the work. models/common/decoding.py alone calls these.
#include <pybind11/pybind11.h>

#include "bindings.hpp"
#include "decode.hpp"

namespace py = pybind11;

namespace {

float* floats(uintptr_t address) { return reinterpret_cast<float*>(address); }

}  // namespace

void bind_decoding(py::module_& module) {
  module.def(
      "add_rms_norm",
      [](uintptr_t states, uintptr_t update, uintptr_t weight, float eps, int64_t rows,
         int64_t width, uintptr_t normed) {
        tokamake::add_rms_norm(floats(states), floats(update), floats(weight), eps, rows, width,
                               floats(normed));
      },
      py::arg("states"), py::arg("update"), py::arg("weight"), py::arg("eps"), py::arg("rows"),
      py::arg("width"), py::arg("normed"));
  module.def(
      "attend",
      [](uintptr_t projected, uintptr_t cosines, uintptr_t sines, uintptr_t keys, uintptr_t values,
         int64_t row_stride, int64_t group_stride, uintptr_t lengths, int64_t rows, int64_t heads,
         int64_t groups, int64_t width, uintptr_t mixed) {
        tokamake::attend(floats(projected), floats(cosines), floats(sines),
                         {floats(keys), floats(values), row_stride, group_stride},
                         reinterpret_cast<const int64_t*>(lengths), {rows, heads, groups, width},
                         floats(mixed));
      },
      // It takes long enough for another thread, such as a server's, to do something.
      py::call_guard<py::gil_scoped_release>(), py::arg("projected"), py::arg("cosines"),
      py::arg("sines"), py::arg("keys"), py::arg("values"), py::arg("row_stride"),
      py::arg("group_stride"), py::arg("lengths"), py::arg("rows"), py::arg("heads"),
      py::arg("groups"), py::arg("width"), py::arg("mixed"));
  module.def(
      "gate",
      [](uintptr_t projected, int64_t rows, int64_t width, uintptr_t gated) {
        tokamake::gate(floats(projected), rows, width, floats(gated));
      },
      py::arg("projected"), py::arg("rows"), py::arg("width"), py::arg("gated"));
}
