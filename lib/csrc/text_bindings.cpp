// Python bindings for the reader of JSON lines and the encoders of texts.
#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "json_lines.hpp"
#include "merges.hpp"
#include "text_encoder.hpp"
#include "unigram.hpp"
#include "vocabulary.hpp"
#include "word_pieces.hpp"

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

using Ids = std::vector<std::pair<py::bytes, uint32_t>>;

tokamake::WordTable table_of(const Ids& words) {
  tokamake::WordTable table(words.size());
  for (const auto& [word, id] : words) table.add(std::string(word), {id});
  return table;
}

std::shared_ptr<tokamake::Merges> merges_of(const UInt32Array& bytes, const UInt32Array& merges,
                                            const Ids& characters, bool shares_ranks,
                                            const Ids& whole) {
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
  return std::make_shared<tokamake::Merges>(singles, pairs, table_of(characters), shares_ranks,
                                            table_of(whole));
}

py::list list_of(const tokamake::Vocabulary::Ids& words) {
  py::list list;
  for (const auto& [word, id] : words) list.append(py::make_tuple(py::bytes(word), id));
  return list;
}

UInt32Array rows_of(const std::vector<tokamake::Merges::Merge>& merges) {
  UInt32Array rows({static_cast<py::ssize_t>(merges.size()), py::ssize_t{3}});
  uint32_t* row = rows.mutable_data();
  for (const auto& merge : merges) {
    *row++ = merge.left;
    *row++ = merge.right;
    *row++ = merge.merged;
  }
  return rows;
}

py::object model_spans(const py::bytes& definition) {
  tokamake::ModelSpans found;
  if (!tokamake::find_model(std::string_view(definition), found)) return py::none();
  const auto span = [](const tokamake::ModelSpans::Span& at) {
    return py::make_tuple(at.begin, at.end);
  };
  return py::make_tuple(span(found.vocab), span(found.merges), found.highest);
}

using UInt16Array = py::array_t<uint16_t, py::array::c_style>;
using Texts = std::vector<std::tuple<std::string, uint32_t, uint32_t>>;
using Map = std::tuple<UInt32Array, std::vector<std::string>, UInt8Array>;
using Split = std::tuple<UInt8Array, UInt16Array, bool, bool>;

std::vector<uint8_t> bytes_of(const UInt8Array& array) {
  return std::vector<uint8_t>(array.data(), array.data() + array.size());
}

tokamake::PreTokenizer pre_tokenizer_of(const std::vector<Split>& splits,
                                        const UInt8Array& joints) {
  std::vector<tokamake::Splitter> splitters;
  for (const auto& [classes, transitions, keeps_matches, keeps_gaps] : splits) {
    if (transitions.ndim() != 2 || transitions.shape(1) < 2)
      throw std::invalid_argument("transitions must have two dimensions");
    splitters.emplace_back(
        bytes_of(classes),
        std::vector<uint16_t>(transitions.data(), transitions.data() + transitions.size()),
        static_cast<size_t>(transitions.shape(1)) - 1, keeps_matches, keeps_gaps);
  }
  return tokamake::PreTokenizer(std::move(splitters), bytes_of(joints));
}

tokamake::AddedTexts added_of(const Texts& texts, const UInt8Array& letters) {
  std::vector<tokamake::AddedTexts::Added> added;
  for (const auto& [text, id, flags] : texts) added.push_back({text, id, flags});
  return tokamake::AddedTexts(added, bytes_of(letters));
}

tokamake::CharacterMap map_of(const std::optional<Map>& map) {
  if (!map) return {};
  const auto& [numbers, texts, ranks] = *map;
  return tokamake::CharacterMap({numbers.data(), numbers.data() + numbers.size()}, texts,
                                bytes_of(ranks));
}

tokamake::Prefix prefix_of(const std::string& name) {
  const std::array<const char*, 6> names = {"",       "document",    "unless space",
                                            "always", "unless mark", "first unless mark"};
  const auto* const found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) throw std::invalid_argument("unknown prefix");
  return static_cast<tokamake::Prefix>(found - names.begin());
}

std::shared_ptr<tokamake::WordPieces> word_pieces_of(const tokamake::Vocabulary& vocabulary,
                                                     const std::string& prefix, uint32_t unknown,
                                                     size_t longest, const UInt8Array& kinds) {
  return std::make_shared<tokamake::WordPieces>(vocabulary.words(), prefix, unknown, longest,
                                                bytes_of(kinds));
}

std::shared_ptr<tokamake::Unigram> unigram_of(
    const std::vector<std::pair<py::bytes, double>>& pieces, std::optional<uint32_t> unknown,
    const UInt32Array& bytes, const std::string& marks, const UInt8Array& spaces) {
  using Marks = tokamake::Unigram::Marks;
  tokamake::Unigram::Pieces texts;
  for (const auto& [text, score] : pieces) texts.emplace_back(std::string(text), score);
  if (marks != "" && marks != "spaces" && marks != "words")
    throw std::invalid_argument("unknown marks");
  const auto kind = marks.empty()      ? Marks::kNone
                    : marks == "words" ? Marks::kWords
                                       : Marks::kSpaces;
  return std::make_shared<tokamake::Unigram>(
      texts, unknown, std::vector<uint32_t>(bytes.data(), bytes.data() + bytes.size()), kind,
      bytes_of(spaces));
}

std::unique_ptr<tokamake::TextEncoder> encoder_of(
    std::shared_ptr<tokamake::WordModel> model, const std::vector<Split>& splits,
    const UInt8Array& joints, const Texts& added, const Texts& later, const UInt8Array& letters,
    const std::optional<Map>& before, const UInt8Array& marks, const std::optional<Map>& after,
    const std::string& prefix, bool normalizes_words, bool strips_left, bool strips_right,
    bool strips_normalized) {
  tokamake::Normalizer normalizer(map_of(before), bytes_of(marks), map_of(after));
  return std::make_unique<tokamake::TextEncoder>(
      std::move(model),
      tokamake::TextEncoder::Rules{added_of(added, letters), added_of(later, letters),
                                   std::move(normalizer), pre_tokenizer_of(splits, joints),
                                   prefix_of(prefix), normalizes_words, strips_left, strips_right,
                                   strips_normalized});
}

// Encodes texts. Normalizes unknown clusters by `normalize`, and encodes the texts again.
py::tuple encode_views(tokamake::TextEncoder& tokenizer, const std::vector<std::string_view>& views,
                       const py::function& normalize) {
  Int64Array lengths(static_cast<py::ssize_t>(views.size()));
  size_t room = 0;
  {
    py::gil_scoped_release release;
    room = tokenizer.room_for(views);
  }
  if (room > static_cast<size_t>(std::numeric_limits<py::ssize_t>::max()))
    throw std::length_error("texts are too long");
  UInt32Array ids(static_cast<py::ssize_t>(room));
  int64_t* to_lengths = lengths.mutable_data();
  uint32_t* to_ids = ids.mutable_data();
  auto& normalizer = tokenizer.normalizer();
  normalizer.trim();
  while (true) {
    size_t tokens = 0;
    {
      py::gil_scoped_release release;
      tokens = tokenizer.encode(views, to_ids, room, to_lengths);
    }
    if (normalizer.unknown().empty()) {
      normalizer.trim();
      return py::make_tuple(cut(ids, tokens), lengths);
    }
    for (const auto& cluster : normalizer.unknown())
      normalizer.learn(cluster, normalize(cluster).cast<std::string>());
    normalizer.forget_unknown();
  }
}

py::tuple encode(tokamake::TextEncoder& tokenizer, const py::list& texts,
                 const py::function& normalize) {
  return encode_views(tokenizer, views_of(texts), normalize);
}

py::tuple encode_utf8(tokamake::TextEncoder& tokenizer, const UInt8Array& utf8,
                      const Int64Array& ends, const py::function& normalize) {
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
  return encode_views(tokenizer, views, normalize);
}

}  // namespace

void bind_texts(py::module_& module) {
  module.def("json_texts", &json_texts, py::arg("lines"), py::arg("key"));
  module.def("model_spans", &model_spans, py::arg("definition"));
  py::class_<tokamake::Vocabulary>(module, "Vocabulary", "Vocabulary and merges.")
      .def(py::init([](const py::bytes& vocab, const py::bytes& merges) {
             return std::make_unique<tokamake::Vocabulary>(std::string_view(vocab),
                                                           std::string_view(merges));
           }),
           py::arg("vocab"), py::arg("merges"))
      .def("id",
           [](const tokamake::Vocabulary& vocabulary, const py::str& text) -> py::object {
             const uint32_t* const id = vocabulary.id(view_of(text));
             return id == nullptr ? py::object(py::none()) : py::int_(*id);
           })
      .def("merges",
           [](const tokamake::Vocabulary& vocabulary) { return rows_of(vocabulary.merges()); })
      .def("characters",
           [](const tokamake::Vocabulary& vocabulary) { return list_of(vocabulary.characters()); })
      .def("byte_words",
           [](const tokamake::Vocabulary& vocabulary, const std::vector<uint32_t>& alphabet) {
             return list_of(vocabulary.byte_words(alphabet));
           })
      .def("joints", [](const tokamake::Vocabulary& vocabulary) {
        const auto joints = vocabulary.joints();
        return UInt8Array(static_cast<py::ssize_t>(joints.size()), joints.data());
      });
  using tokamake::WordModel;
  py::class_<WordModel, std::shared_ptr<WordModel>>(module, "WordModel", "Encodes words.");
  py::class_<tokamake::Merges, WordModel, std::shared_ptr<tokamake::Merges>>(module, "BytePairs",
                                                                             "Byte pair encoding.")
      .def(py::init(&merges_of), py::arg("bytes").noconvert(), py::arg("merges").noconvert(),
           py::kw_only(), py::arg("characters") = py::list(), py::arg("shares_ranks") = false,
           py::arg("whole") = py::list());
  py::class_<tokamake::WordPieces, WordModel, std::shared_ptr<tokamake::WordPieces>>(
      module, "WordPieces", "WordPiece.")
      .def(py::init(&word_pieces_of), py::arg("vocabulary"), py::kw_only(), py::arg("prefix"),
           py::arg("unknown"), py::arg("longest"), py::arg("kinds").noconvert());
  py::class_<tokamake::Unigram, WordModel, std::shared_ptr<tokamake::Unigram>>(
      module, "Unigram", "Unigram language model.")
      .def(py::init(&unigram_of), py::arg("pieces"), py::kw_only(), py::arg("unknown") = py::none(),
           py::arg("bytes").noconvert() = UInt32Array(0), py::arg("marks") = "",
           py::arg("spaces").noconvert() = UInt8Array(0));
  py::class_<tokamake::TextEncoder>(module, "TextEncoder", "Encodes texts by a model of words.")
      .def(py::init(&encoder_of), py::arg("model"), py::kw_only(), py::arg("splits") = py::list(),
           py::arg("joints").noconvert() = UInt8Array(0), py::arg("added") = py::list(),
           py::arg("later") = py::list(), py::arg("letters").noconvert() = UInt8Array(0),
           py::arg("before") = py::none(), py::arg("marks").noconvert() = UInt8Array(0),
           py::arg("after") = py::none(), py::arg("prefix") = "",
           py::arg("normalizes_words") = false, py::arg("strips_left") = false,
           py::arg("strips_right") = false, py::arg("strips_normalized") = false)
      .def("encode", &encode, py::arg("texts"), py::arg("normalize"))
      .def("encode_utf8", &encode_utf8, py::arg("utf8").noconvert(), py::arg("ends").noconvert(),
           py::arg("normalize"));
}
