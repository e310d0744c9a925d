// Python bindings of everything but decoding, masking, texts and their statistics. NumPy arrays
// come in by reference, and results are new arrays. Longer work runs without Python's global
// interpreter lock. lib/tokamake/_csrc.pyi documents all functions.
#include "bindings.hpp"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "blend.hpp"
#include "exact.hpp"
#include "index.hpp"
#include "lanes.hpp"
#include "mapped.hpp"
#include "mapping.hpp"
#include "shuffle.hpp"
#include "text.hpp"

namespace py = pybind11;

namespace {

tokamake::Int32View view(const Int32Array& array) {
  check_one_dimension(array);
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

py::array_t<uint8_t> map_file(const py::object& path) {
  const auto name = py::module_::import("os").attr("fsencode")(path).cast<std::string>();
  std::unique_ptr<tokamake::MappedFile> file;
  try {
    file = std::make_unique<tokamake::MappedFile>(name);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
    throw py::error_already_set();
  }
  const auto* mapped = file.get();
  const py::capsule owner(
      file.release(), [](void* pointer) { delete static_cast<tokamake::MappedFile*>(pointer); });
  py::array_t<uint8_t> bytes(mapped->size(), mapped->data(), owner);
  bytes.attr("setflags")(py::arg("write") = false);
  return bytes;
}

py::array build_sample_index(const Int32Array& lengths, const Int32Array& document_index,
                             int64_t sequence_length, int64_t num_epochs, int64_t tokens_per_epoch,
                             bool wide) {
  const auto samples = tokamake::count_samples(sequence_length, num_epochs, tokens_per_epoch);
  // Like Megatron, the number of positions decides. Offsets always fit: a length is an int32.
  wide = wide || document_index.size() > std::numeric_limits<int32_t>::max();
  const auto build = wide ? sample_index<int64_t> : sample_index<int32_t>;
  return build(view(lengths), view(document_index), sequence_length, samples);
}

// Divides work into blocks of less than a second, so that Ctrl-C works between them.
template <typename Work>
void in_blocks(int64_t size, int64_t block, const Work& work) {
  for (int64_t start = 0; start < size; start += block) {
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    py::gil_scoped_release release;
    work(start, std::min(block, size - start));
  }
}

template <typename T>
std::vector<T> to_vector(const py::array_t<T, py::array::c_style>& array) {
  check_one_dimension(array);
  std::vector<T> values(static_cast<size_t>(array.size()));
  const auto* data = static_cast<const char*>(static_cast<const py::array&>(array).data());
  std::copy_n(data, values.size() * sizeof(T), reinterpret_cast<char*>(values.data()));
  return values;
}

py::tuple draw_blend(tokamake::Blender& blender, int64_t size) {
  if (size < 0 || size > blender.left()) {
    throw std::invalid_argument("size must be 0 to the number of samples left");
  }
  py::array_t<int16_t> dataset_index(size);
  py::array_t<int64_t> dataset_sample_index(size);
  auto* datasets = dataset_index.mutable_data();
  auto* samples = dataset_sample_index.mutable_data();
  in_blocks(size, 1 << 15, [&](int64_t start, int64_t count) {
    blender.draw(count, datasets + start, samples + start);
  });
  return py::make_tuple(dataset_index, dataset_sample_index);
}

const tokamake::Lanes& lanes(bool widest) {
  return widest ? tokamake::widest_lanes() : tokamake::kLanesOf128Bits;
}

py::tuple exact_block(const tokamake::ExactBlend& blend, int64_t start, int64_t stop) {
  if (start < 0 || start > stop || stop > blend.size()) {
    throw std::out_of_range("the blend has no such samples");
  }
  py::array_t<int32_t> dataset_index(stop - start);
  py::array_t<int64_t> dataset_sample_index(stop - start);
  auto* datasets = dataset_index.mutable_data();
  auto* samples = dataset_sample_index.mutable_data();
  {
    py::gil_scoped_release release;
    blend.fill(start, stop, datasets, samples);
  }
  return py::make_tuple(dataset_index, dataset_sample_index);
}

template <typename T>
int64_t shuffle(py::array_t<T, py::array::c_style>& values, UInt32Array& key, int64_t position) {
  if (values.ndim() != 1 || key.ndim() != 1 || key.size() != tokamake::Twister::kWords) {
    throw std::invalid_argument("arrays must have one dimension, and the key 624 words");
  }
  if (values.size() > int64_t{1} << 32 || position < 0 || position > key.size()) {
    throw std::invalid_argument("at most 2**32 values, and a position of 0 to 624");
  }
  tokamake::Twister twister(key.mutable_data(), position);
  T* data = values.mutable_data();
  const int64_t last = static_cast<int64_t>(values.size()) - 1;
  in_blocks(last, 1 << 22, [&](int64_t done, int64_t count) {
    tokamake::shuffle(data, last - done, last - done - count, twister);
  });
  return twister.position();
}

template <typename T>
py::array as_rows(std::vector<T>&& values, int64_t columns) {
  // The array takes ownership of the vector: no copy.
  auto* owned = new std::vector<T>(std::move(values));
  const py::capsule owner(owned, [](void* data) { delete static_cast<std::vector<T>*>(data); });
  const auto rows = static_cast<int64_t>(owned->size()) / columns;
  return py::array_t<T>({rows, columns}, owned->data(), owner);
}

// Rows of uint32, or of uint64 if uint32 cannot count the sentences. The argument of `fill` only
// carries the type.
template <typename Fill>
py::array mapping(const tokamake::Int32View& lengths, int64_t columns, const Fill& fill) {
  const auto build = [&](auto type) {
    std::vector<decltype(type)> rows;
    {
      py::gil_scoped_release release;
      rows = fill(type);
    }
    return as_rows(std::move(rows), columns);
  };
  const bool wide = lengths.size() > std::numeric_limits<uint32_t>::max();
  return wide ? build(uint64_t{}) : build(uint32_t{});
}

tokamake::Sentences sentences_of(const Int64Array& documents, const tokamake::Int32View& lengths) {
  if (documents.ndim() != 1 || documents.size() < 1) {
    throw std::invalid_argument("documents must have one dimension, and at least one bound");
  }
  return {documents.data(), documents.size() - 1, lengths};
}

py::array build_mapping(const Int64Array& documents, const Int32Array& lengths, int32_t num_epochs,
                        uint64_t max_num_samples, int32_t max_seq_length, double short_seq_prob,
                        int32_t seed, int32_t min_num_sent) {
  const auto tokens = view(lengths);
  const auto sentences = sentences_of(documents, tokens);
  const tokamake::SampleRule rule{num_epochs, max_num_samples, max_seq_length, short_seq_prob,
                                  seed,       min_num_sent};
  return mapping(tokens, 3,
                 [&](auto type) { return tokamake::map_samples<decltype(type)>(sentences, rule); });
}

py::array build_blocks_mapping(const Int64Array& documents, const Int32Array& lengths,
                               const Int32Array& title_lengths, int32_t num_epochs,
                               uint64_t max_num_samples, int32_t max_seq_length, int32_t seed,
                               bool use_one_sent_blocks) {
  const auto tokens = view(lengths);
  const auto titles = view(title_lengths);
  const auto sentences = sentences_of(documents, tokens);
  const tokamake::BlockRule rule{num_epochs, max_num_samples, max_seq_length, seed,
                                 use_one_sent_blocks ? 1 : 2};
  return mapping(tokens, 4, [&](auto type) {
    return tokamake::map_blocks<decltype(type)>(sentences, titles, rule);
  });
}

template <typename T>
py::array packed_tokens(const UInt32Array& ids, const Int64Array& lengths, int64_t bos,
                        int64_t eod) {
  const int64_t* counts = lengths.data();
  const auto documents =
      std::count_if(counts, counts + lengths.size(), [](int64_t n) { return n > 0; });
  const int64_t size = ids.size() + documents * ((bos >= 0) + (eod >= 0));
  py::array_t<T> packed(size);
  const uint32_t* from = ids.data();
  T* to = packed.mutable_data();
  {
    py::gil_scoped_release release;
    tokamake::pack_tokens(from, ids.size(), counts, lengths.size(), bos, eod, to, size);
  }
  return packed;
}

py::array pack(const UInt32Array& ids, const Int64Array& lengths, int64_t bos, int64_t eod,
               const py::object& dtype) {
  const auto type = py::dtype::from_args(dtype);
  check_one_dimension(ids, lengths);
  if (type.equal(py::dtype::of<uint16_t>())) return packed_tokens<uint16_t>(ids, lengths, bos, eod);
  if (type.equal(py::dtype::of<int32_t>())) return packed_tokens<int32_t>(ids, lengths, bos, eod);
  throw std::invalid_argument("tokens are packed as uint16 or int32");
}

}  // namespace

std::vector<std::string_view> views_of(const py::list& texts) {
  std::vector<std::string_view> views;
  views.reserve(texts.size());
  for (const py::handle text : texts) {
    Py_ssize_t size = 0;
    const char* begin = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (begin == nullptr) throw py::error_already_set();
    views.emplace_back(begin, static_cast<size_t>(size));
  }
  return views;
}

PYBIND11_MODULE(_csrc, module) {
  module.doc() = "Sample indexes, blends, and fast paths of reading and tokenization.";
  module.def("build_sample_index", &build_sample_index, py::arg("lengths").noconvert(),
             py::arg("document_index").noconvert(), py::arg("sequence_length"),
             py::arg("num_epochs"), py::arg("tokens_per_epoch"), py::kw_only(),
             py::arg("wide") = false);
  module.def("map_file", &map_file, py::arg("path"));
  py::class_<tokamake::Blender>(module, "Blender", "A blend that is drawn in blocks.")
      .def(py::init([](const Float64Array& weights, bool widest) {
             return tokamake::Blender::of_weights(to_vector(weights), lanes(widest));
           }),
           py::arg("weights").noconvert(), py::kw_only(), py::arg("widest") = true)
      .def_static(
          "exhaustive",
          [](const Int64Array& sizes, bool widest) {
            return tokamake::Blender::of_sizes(to_vector(sizes), lanes(widest));
          },
          py::arg("sizes").noconvert(), py::kw_only(), py::arg("widest") = true)
      .def("draw", &draw_blend, py::arg("size"));
  py::class_<tokamake::ExactBlend>(module, "ExactBlend", "Exact blend in integers.")
      .def(py::init([](const Int64Array& counts) {
             return std::make_unique<tokamake::ExactBlend>(to_vector(counts));
           }),
           py::arg("counts").noconvert())
      .def("block", &exact_block, py::arg("start"), py::arg("stop"));
  module.def("shuffle", &shuffle<uint32_t>, py::arg("values").noconvert(),
             py::arg("key").noconvert(), py::arg("position"));
  module.def("shuffle", &shuffle<int32_t>, py::arg("values").noconvert(),
             py::arg("key").noconvert(), py::arg("position"));
  module.def("shuffle", &shuffle<int64_t>, py::arg("values").noconvert(),
             py::arg("key").noconvert(), py::arg("position"));
  module.def("build_mapping", &build_mapping, py::arg("documents").noconvert(),
             py::arg("lengths").noconvert(), py::kw_only(), py::arg("num_epochs"),
             py::arg("max_num_samples"), py::arg("max_seq_length"), py::arg("short_seq_prob"),
             py::arg("seed"), py::arg("min_num_sent"));
  module.def("build_blocks_mapping", &build_blocks_mapping, py::arg("documents").noconvert(),
             py::arg("lengths").noconvert(), py::arg("title_lengths").noconvert(), py::kw_only(),
             py::arg("num_epochs"), py::arg("max_num_samples"), py::arg("max_seq_length"),
             py::arg("seed"), py::arg("use_one_sent_blocks"));
  module.def("pack", &pack, py::arg("ids").noconvert(), py::arg("lengths").noconvert(),
             py::kw_only(), py::arg("bos"), py::arg("eod"), py::arg("dtype"));
  bind_bpe_training(module);
  bind_decoding(module);
  bind_language(module);
  bind_masking(module);
  bind_minhash(module);
  bind_ngrams(module);
  bind_texts(module);
  bind_text_statistics(module);
  bind_wikitext(module);
}
