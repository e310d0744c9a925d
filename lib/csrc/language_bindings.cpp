// Python bindings for the language of a text.
#include <memory>
#include <string_view>
#include <vector>

#include "bindings.hpp"
#include "language.hpp"

namespace py = pybind11;

namespace {

py::array_t<double> scores(const tokamake::LanguageModel& model, const py::str& text) {
  const auto view = view_of(text);
  std::vector<double> values;
  {
    py::gil_scoped_release release;
    values = model.scores(view);
  }
  return py::array_t<double>(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace

void bind_language(py::module_& module) {
  using tokamake::LanguageModel;
  py::class_<LanguageModel>(module, "LanguageModel", "A model of fastText that knows languages.")
      .def(py::init([](const py::bytes& file) {
             return std::make_unique<LanguageModel>(static_cast<std::string_view>(file));
           }),
           py::arg("file"))
      .def_property_readonly("labels", &LanguageModel::labels)
      .def("scores", &scores, py::arg("text"));
}
