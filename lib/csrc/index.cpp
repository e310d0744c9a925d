// Builds the sample index in one pass over documents and samples.
#include "index.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string>

namespace tokamake {
namespace {

// Lengths of the documents in reading order. They are scattered over `lengths`, so a loop without
// dependent branches fetches a block of them: several cache misses then overlap.
class LengthStream {
 public:
  LengthStream(const Int32View& lengths, const Int32View& document_index)
      : lengths_(lengths), document_index_(document_index) {}

  int64_t next() {
    if (cursor_ == filled_) refill();
    return block_[cursor_++];
  }

 private:
  void refill() {
    filled_ = std::min<int64_t>(kBlock, document_index_.size() - fetched_);
    if (filled_ == 0) {
      throw std::invalid_argument("document_index holds fewer tokens than the epochs need");
    }
    for (int64_t i = 0; i < filled_; ++i) block_[i] = lengths_[checked(fetched_ + i)];
    if (*std::min_element(block_.begin(), block_.begin() + filled_) < 0) {
      throw std::invalid_argument("a length is negative");
    }
    fetched_ += filled_;
    cursor_ = 0;
  }

  int64_t checked(int64_t position) const {
    const int64_t document = document_index_[position];
    if (document < 0 || document >= lengths_.size()) {
      throw std::out_of_range("document_index[" + std::to_string(position) + "] is " +
                              std::to_string(document) + ", but there are " +
                              std::to_string(lengths_.size()) + " lengths");
    }
    return document;
  }

  static constexpr int64_t kBlock = 1024;
  const Int32View& lengths_;
  const Int32View& document_index_;
  std::array<int32_t, kBlock> block_{};
  int64_t fetched_ = 0;  // documents in this block and all earlier ones
  int64_t filled_ = 0;
  int64_t cursor_ = 0;
};

}  // namespace

int64_t count_samples(int64_t sequence_length, int64_t num_epochs, int64_t tokens_per_epoch) {
  if (sequence_length < 1 || num_epochs < 1 || tokens_per_epoch < 1) {
    throw std::invalid_argument("sequence_length, num_epochs and tokens_per_epoch start at 1");
  }
  // The document of the last token may end up to one int32 after it.
  constexpr int64_t kMaxTokens =
      std::numeric_limits<int64_t>::max() - std::numeric_limits<int32_t>::max();
  if (tokens_per_epoch > kMaxTokens / num_epochs) {
    throw std::invalid_argument("num_epochs x tokens_per_epoch overflows 64 bits");
  }
  return (num_epochs * tokens_per_epoch - 1) / sequence_length;
}

template <typename T>
void fill_sample_index(const Int32View& lengths, const Int32View& document_index,
                       int64_t sequence_length, int64_t num_samples, T* rows) {
  // Like Megatron: row 0 is at the first document, even if that is empty.
  rows[0] = rows[1] = 0;
  LengthStream stream(lengths, document_index);
  int64_t position = -1;
  int64_t begin = 0;  // tokens before the document at `position`
  int64_t end = 0;    // tokens up to and with this document
  for (int64_t sample = 1; sample <= num_samples; ++sample) {
    const int64_t token = sample * sequence_length;
    while (end <= token) {
      begin = end;
      end += stream.next();
      ++position;
    }
    rows[2 * sample] = static_cast<T>(position);
    rows[2 * sample + 1] = static_cast<T>(token - begin);
  }
}

template void fill_sample_index(const Int32View&, const Int32View&, int64_t, int64_t, int32_t*);
template void fill_sample_index(const Int32View&, const Int32View&, int64_t, int64_t, int64_t*);

}  // namespace tokamake
