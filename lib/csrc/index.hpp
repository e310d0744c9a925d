// Sample index of one dataset: the start of each sample in its shuffled documents.
#pragma once

#include <cstdint>
#include <cstring>

namespace tokamake {

// Read-only int32 values at any address: the lengths in an .idx file start at byte 34, unaligned.
class Int32View {
 public:
  Int32View(const void* data, int64_t size) : data_(static_cast<const char*>(data)), size_(size) {}

  int64_t size() const { return size_; }

  int32_t operator[](int64_t i) const {
    int32_t value;
    std::memcpy(&value, data_ + i * static_cast<int64_t>(sizeof(value)), sizeof(value));
    return value;
  }

 private:
  const char* data_;
  int64_t size_;
};

// Number of whole samples in some epochs. Neighboring samples share a token: the last label of one
// is the first input of the next.
int64_t count_samples(int64_t sequence_length, int64_t num_epochs, int64_t tokens_per_epoch);

// Writes num_samples + 1 rows: position in document_index, offset in that document.
template <typename T>
void fill_sample_index(const Int32View& lengths, const Int32View& document_index,
                       int64_t sequence_length, int64_t num_samples, T* rows);

}  // namespace tokamake
