// Python bindings of samples for BERT and T5, and of NumPy's legacy generator for its tests.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "masking.hpp"
#include "random_state.hpp"

namespace py = pybind11;

namespace {

tokamake::MaskingRule make_rule(const UInt8Array& pieces, double probability, int32_t max_ngram,
                                const Float64Array& cumulative, double stop_probability) {
  check_one_dimension(pieces, cumulative);
  if (!(probability > 0 && probability < 1) || max_ngram < 1) {
    throw std::invalid_argument("probability is between 0 and 1, max_ngram 1 or more");
  }
  if (cumulative.size() != 0 && cumulative.size() != max_ngram) {
    throw std::invalid_argument("cumulative has a number for each length up to max_ngram");
  }
  if (cumulative.size() == 0 && !(stop_probability > 0 && stop_probability < 1.0 / 3)) {
    throw std::invalid_argument("stop_probability is between 0 and 1/3");
  }
  tokamake::MaskingRule rule{{}, probability, max_ngram, {}, stop_probability};
  for (py::ssize_t token = 0; token < pieces.size(); ++token) {
    if (pieces.at(token) > 2) throw std::invalid_argument("kinds of pieces are 0 to 2");
    rule.pieces.push_back(static_cast<tokamake::Piece>(pieces.at(token)));
  }
  rule.cumulative.assign(cumulative.data(), cumulative.data() + cumulative.size());
  return rule;
}

// A part of a row of int64: writes to it need no bounds check of NumPy.
int64_t* writable(Int64Array& row, int64_t size) {
  if (row.ndim() != 1 || row.size() != size) {
    throw std::invalid_argument("the row has another size");
  }
  return row.mutable_data();
}

class MaskedSampler {
 public:
  MaskedSampler(tokamake::MaskingRule rule, tokamake::MaskedTokens special, bool in_two)
      : masker_(std::move(rule)), special_(std::move(special)), in_two_(in_two) {
    if (special_.random.empty()) throw std::invalid_argument("no tokens to draw from");
  }

  // Writes tokens, types, labels (each `length`), the number of tokens, swapped, truncated.
  void write(const Int32Array& tokens, const Int32Array& lengths, int32_t target, uint32_t seed,
             Int64Array& row) {
    check_one_dimension(tokens, lengths);
    const std::vector<int32_t> sizes(lengths.data(), lengths.data() + lengths.size());
    int64_t total = 0;
    for (const int32_t size : sizes) {
      if (size < 0) throw std::invalid_argument("a sentence has a negative length");
      total += size;
    }
    if (total != tokens.size()) throw std::invalid_argument("the lengths do not add up");
    const int64_t length = (row.size() - 3) / 3;
    int64_t* data = writable(row, 3 * length + 3);
    const auto facts =
        tokamake::mask_sample(tokens.data(), sizes, target, in_two_, special_, seed, masker_,
                              {length, data, data + length, data + 2 * length});
    int64_t* last = data + 3 * length;
    last[0] = facts.length;
    last[1] = facts.swapped;
    last[2] = facts.truncated;
  }

 private:
  tokamake::Masker masker_;
  tokamake::MaskedTokens special_;
  bool in_two_;
};

class SpanSampler {
 public:
  SpanSampler(tokamake::MaskingRule rule, tokamake::SpanTokens special)
      : masker_(std::move(rule)), special_(std::move(special)) {}

  // Writes encoder (`length`), decoder and labels (`decoder_length` each), then the number of
  // tokens of encoder and decoder, and whether tokens were dropped.
  void write(const Int32Array& tokens, int32_t target, uint32_t seed, int64_t decoder_length,
             Int64Array& row) {
    check_one_dimension(tokens);
    const int64_t length = row.size() - 2 * decoder_length - 3;
    if (length < 0 || decoder_length < 1) throw std::invalid_argument("the row is too short");
    int64_t* data = writable(row, length + 2 * decoder_length + 3);
    const int64_t count = std::min<int64_t>(tokens.size(), target);
    const auto facts = tokamake::corrupt_spans(
        tokens.data(), count, target, special_, seed, masker_,
        {length, data, decoder_length, data + length, data + length + decoder_length});
    int64_t* last = data + length + 2 * decoder_length;
    last[0] = facts.length;
    last[1] = facts.decoder_length;
    last[2] = tokens.size() > target;
  }

  // (samples, 2) length of the decoder and number of spans of many samples: sample i has
  // `counts[i]` tokens from `starts[i]` on, and the seed `seed + i` modulo 2**32.
  py::array_t<int32_t> sizes(const py::array& tokens, const Int64Array& starts,
                             const Int32Array& counts, const Int32Array& targets, uint32_t seed) {
    if (py::isinstance<py::array_t<uint16_t>>(tokens)) {
      return sizes_of<uint16_t>(tokens, starts, counts, targets, seed);
    }
    if (py::isinstance<py::array_t<int32_t>>(tokens)) {
      return sizes_of<int32_t>(tokens, starts, counts, targets, seed);
    }
    throw std::invalid_argument("tokens are uint16 or int32");
  }

 private:
  template <typename T>
  py::array_t<int32_t> sizes_of(const py::array_t<T, py::array::c_style>& tokens,
                                const Int64Array& starts, const Int32Array& counts,
                                const Int32Array& targets, uint32_t seed) {
    check_one_dimension(tokens, starts, counts, targets);
    const int64_t num_samples = counts.size();
    if (starts.size() != num_samples || targets.size() != num_samples) {
      throw std::invalid_argument("arrays must have a number for each sample");
    }
    // NumPy maps files: their tokens need not be aligned.
    const auto* data = static_cast<const char*>(static_cast<const py::array&>(tokens).data());
    const int64_t total = tokens.size();
    const int64_t* first = starts.data();
    const int32_t* size = counts.data();
    const int32_t* target = targets.data();
    py::array_t<int32_t> result({num_samples, int64_t{2}});
    int32_t* to = result.mutable_data();
    py::gil_scoped_release release;
    std::vector<T> copied;
    std::vector<int32_t> wide;
    for (int64_t i = 0; i < num_samples; ++i) {
      if (first[i] < 0 || size[i] < 0 || size[i] > total - first[i]) {
        throw std::out_of_range("a sample is outside the tokens");
      }
      copied.resize(static_cast<size_t>(size[i]));
      const char* from = data + first[i] * static_cast<int64_t>(sizeof(T));
      std::copy_n(from, copied.size() * sizeof(T), reinterpret_cast<char*>(copied.data()));
      wide.assign(copied.begin(), copied.end());
      const auto measured = tokamake::measure_spans(wide.data(), size[i], target[i],
                                                    seed + static_cast<uint32_t>(i), masker_);
      to[2 * i] = static_cast<int32_t>(measured.decoder_length);
      to[2 * i + 1] = static_cast<int32_t>(measured.spans);
    }
    return result;
  }

  tokamake::Masker masker_;
  tokamake::SpanTokens special_;
};

}  // namespace

void bind_masking(py::module_& module) {
  py::class_<tokamake::RandomState>(module, "RandomState", "NumPy's legacy generator.")
      .def(py::init<uint32_t>(), py::arg("seed"))
      .def("random", &tokamake::RandomState::uniform)
      .def(
          "randint",
          [](tokamake::RandomState& self, int64_t low, int64_t high) {
            if (high <= low || high - low > 0xffffffffLL) {
              throw std::invalid_argument("high is above low, by less than 2**32");
            }
            return self.integer(low, static_cast<uint32_t>(high - low));
          },
          py::arg("low"), py::arg("high"))
      .def("geometric", &tokamake::RandomState::geometric, py::arg("p"))
      .def(
          "choice",
          [](tokamake::RandomState& self, const std::vector<double>& cumulative) {
            return self.choice(cumulative);
          },
          py::arg("cumulative"))
      .def(
          "permutation",
          [](tokamake::RandomState& self, std::vector<int32_t> values) {
            self.shuffle(values);
            return values;
          },
          py::arg("values"));
  py::class_<MaskedSampler>(module, "MaskedSampler", "Samples of BERT. Not thread-safe.")
      .def(py::init([](const UInt8Array& pieces, double probability, int32_t max_ngram,
                       const Float64Array& cumulative, int64_t pad, int32_t cls, int32_t sep,
                       int64_t mask, const std::vector<int32_t>& random, bool in_two) {
             return std::make_unique<MaskedSampler>(
                 make_rule(pieces, probability, max_ngram, cumulative, 0.0),
                 tokamake::MaskedTokens{pad, cls, sep, mask, random}, in_two);
           }),
           py::arg("pieces").noconvert(), py::kw_only(), py::arg("probability"),
           py::arg("max_ngram"), py::arg("cumulative").noconvert(), py::arg("pad"), py::arg("cls"),
           py::arg("sep"), py::arg("mask"), py::arg("random"), py::arg("in_two"))
      .def("write", &MaskedSampler::write, py::arg("tokens").noconvert(),
           py::arg("lengths").noconvert(), py::kw_only(), py::arg("target"), py::arg("seed"),
           py::arg("row").noconvert());
  py::class_<SpanSampler>(module, "SpanSampler", "Samples of T5. Not thread-safe.")
      .def(py::init([](const UInt8Array& pieces, double probability, int32_t max_ngram,
                       double stop_probability, int64_t pad, int64_t bos, int64_t eos,
                       const std::vector<int64_t>& sentinels) {
             return std::make_unique<SpanSampler>(
                 make_rule(pieces, probability, max_ngram, Float64Array(0), stop_probability),
                 tokamake::SpanTokens{pad, bos, eos, sentinels});
           }),
           py::arg("pieces").noconvert(), py::kw_only(), py::arg("probability"),
           py::arg("max_ngram"), py::arg("stop_probability"), py::arg("pad"), py::arg("bos"),
           py::arg("eos"), py::arg("sentinels"))
      .def("write", &SpanSampler::write, py::arg("tokens").noconvert(), py::kw_only(),
           py::arg("target"), py::arg("seed"), py::arg("decoder_length"),
           py::arg("row").noconvert())
      .def("sizes", &SpanSampler::sizes, py::arg("tokens"), py::kw_only(), py::arg("starts"),
           py::arg("counts"), py::arg("targets"), py::arg("seed"));
}
