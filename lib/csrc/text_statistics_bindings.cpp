// Python bindings for the statistics of texts.
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "c4_lines.hpp"
#include "text_statistics.hpp"
#include "word_splitting.hpp"

namespace py = pybind11;

namespace {

class TextStatistics {
 public:
  explicit TextStatistics(const UInt8Array& flags)
      : flags_(flags.data(), flags.data() + flags.size()) {
    if (flags_.size() != 0x110000) {
      throw std::invalid_argument("the table has an entry for each of 0x110000 code points");
    }
  }

  py::list split_words(const py::str& text) const {
    py::list words;
    tokamake::split_words(view_of(text), flags_.data(), [&](std::string_view word) {
      words.append(py::str(word.data(), word.size()));
    });
    return words;
  }

  int64_t sentences(const py::str& line) const {
    return tokamake::count_sentences(view_of(line), flags_.data());
  }

  tokamake::WordStatistics words(const py::str& text,
                                 const std::vector<std::string>& stop_words) const {
    const auto view = view_of(text);
    py::gil_scoped_release release;
    return tokamake::word_statistics(view, flags_.data(), stop_words);
  }

  tokamake::LineStatistics lines(const py::str& text, int64_t short_characters) const {
    const auto view = view_of(text);
    py::gil_scoped_release release;
    return tokamake::line_statistics(view, flags_.data(), short_characters);
  }

  tokamake::Repetition repetition(const py::str& text) const {
    const auto view = view_of(text);
    py::gil_scoped_release release;
    return tokamake::repetition(view, flags_.data());
  }

  tokamake::C4Lines c4_lines(const py::str& text, const tokamake::C4Rules& rules) const {
    const auto view = view_of(text);
    py::gil_scoped_release release;
    return tokamake::c4_lines(view, flags_.data(), rules);
  }

 private:
  std::vector<uint8_t> flags_;
};

}  // namespace

void bind_text_statistics(py::module_& module) {
  using namespace tokamake;
  py::class_<WordStatistics>(module, "WordStatistics", "Counts of words and their lines.")
      .def_readonly("words", &WordStatistics::words)
      .def_readonly("plain_words", &WordStatistics::plain_words)
      .def_readonly("plain_characters", &WordStatistics::plain_characters)
      .def_readonly("alphabetic_words", &WordStatistics::alphabetic_words)
      .def_readonly("stop_words", &WordStatistics::stop_words)
      .def_readonly("hashes", &WordStatistics::hashes)
      .def_readonly("ellipses", &WordStatistics::ellipses)
      .def_readonly("lines", &WordStatistics::lines)
      .def_readonly("bullet_lines", &WordStatistics::bullet_lines)
      .def_readonly("ellipsis_lines", &WordStatistics::ellipsis_lines);
  py::class_<LineStatistics>(module, "LineStatistics", "Counts of lines.")
      .def_readonly("characters", &LineStatistics::characters)
      .def_readonly("words", &LineStatistics::words)
      .def_readonly("line_feeds", &LineStatistics::line_feeds)
      .def_readonly("lines", &LineStatistics::lines)
      .def_readonly("ended_lines", &LineStatistics::ended_lines)
      .def_readonly("short_lines", &LineStatistics::short_lines)
      .def_readonly("duplicate_characters", &LineStatistics::duplicate_characters);
  py::class_<Repetition>(module, "Repetition", "Counts of repeated lines, paragraphs and words.")
      .def_readonly("characters", &Repetition::characters)
      .def_readonly("paragraphs", &Repetition::paragraphs)
      .def_readonly("duplicate_paragraphs", &Repetition::duplicate_paragraphs)
      .def_readonly("duplicate_paragraph_characters", &Repetition::duplicate_paragraph_characters)
      .def_readonly("lines", &Repetition::lines)
      .def_readonly("duplicate_lines", &Repetition::duplicate_lines)
      .def_readonly("duplicate_line_characters", &Repetition::duplicate_line_characters)
      .def_readonly("top", &Repetition::top)
      .def_readonly("repeated", &Repetition::repeated);
  py::class_<C4Rules>(module, "C4Rules", "Rules of C4 about lines.")
      .def(py::init([](int64_t max_word_characters, int64_t min_words, bool end_marks,
                       bool citations, bool lorem_ipsum, bool javascript, bool curly_bracket,
                       std::vector<std::string> policy) {
             return C4Rules{max_word_characters, min_words,  end_marks,     citations,
                            lorem_ipsum,         javascript, curly_bracket, std::move(policy)};
           }),
           py::kw_only(), py::arg("max_word_characters"), py::arg("min_words"),
           py::arg("end_marks"), py::arg("citations"), py::arg("lorem_ipsum"),
           py::arg("javascript"), py::arg("curly_bracket"), py::arg("policy"));
  py::class_<C4Lines>(module, "C4Lines", "Lines of a text that the rules of C4 keep.")
      .def_readonly("text", &C4Lines::text)
      .def_readonly("sentences", &C4Lines::sentences)
      .def_readonly("refused", &C4Lines::refused)
      .def_readonly("long_words", &C4Lines::long_words)
      .def_readonly("no_end_mark", &C4Lines::no_end_mark)
      .def_readonly("few_words", &C4Lines::few_words)
      .def_readonly("javascript", &C4Lines::javascript)
      .def_readonly("policy", &C4Lines::policy);
  py::class_<TextStatistics>(module, "TextStatistics", "Statistics of texts, for filters.")
      .def(py::init<const UInt8Array&>(), py::arg("flags").noconvert())
      .def("split_words", &TextStatistics::split_words, py::arg("text"))
      .def("sentences", &TextStatistics::sentences, py::arg("line"))
      .def("words", &TextStatistics::words, py::arg("text"), py::arg("stop_words"))
      .def("lines", &TextStatistics::lines, py::arg("text"), py::kw_only(),
           py::arg("short_characters"))
      .def("repetition", &TextStatistics::repetition, py::arg("text"))
      .def("c4_lines", &TextStatistics::c4_lines, py::arg("text"), py::arg("rules"));
}
